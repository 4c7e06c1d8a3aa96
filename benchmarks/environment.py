"""The environment of a measurement: all that timings may depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import FIXED
from conformance.suite.environment import Environment

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("ATEN_CPU_CAPABILITY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD", "CXX")
FAMILIES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "MALLOC_", "OMP_", "MKL_", "KMP_", "GOMP_")
FAMILIES_CUDA = ("CUDA_", "NVIDIA_", "CUBLAS_")
# Each process has a cache of its own; which of several devices it is has no meaning, and its kind is a fact.
PLACES = ("TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def here(device: str, options: dict[str, Any], variables: Mapping[str, str] = os.environ) -> Environment:
    """This machine, its software, the sources and the options that a sample's meaning depends on.

    `variables`: the environment's variables that the measuring processes get.
    """
    base = Environment.here("benchmarks", datetime.now(UTC).isoformat(timespec="seconds"))
    facts = base.facts | {
        "device": device,
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "compiler": _compiler(),
        "governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "torch build": torch.__version__,
        "sources": sources(ROOT),
    }
    families = (*FAMILIES, *(FAMILIES_CUDA if device.startswith("cuda") else ()))
    facts |= {
        name: value
        for name, value in variables.items()
        if name in VARIABLES or (name.startswith(families) and name not in PLACES)
    }
    facts |= {f"option {name}": str(value) for name, value in options.items()}
    if device.startswith("cuda"):
        facts |= _cuda(device)
    return Environment(base.date, facts)


def _cuda(device: str) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    return {
        "gpu": properties.name,
        "gpu memory": str(properties.total_memory),
        "gpu capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "gpu driver, clock, power": _first_line(query),
        **{name: str(value) for name, value in FIXED.items()},
    }


def moment() -> dict[str, Any]:
    """What may differ from job to job, asked before it: the time, how busy the machine is, its memory, which a virtual machine may
    be given more of, and the commit (see `sources`).

    `processors`: their ticks since the machine started that were not idle, and those of them that a host gave to others.
    """
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "date": date,
        "load": load and list(load),
        "processors": _processors(),
        "memory": _memory(),
        "commit": _commit(),
    }


def sources(root: Path) -> str:
    """A digest of the code that timings depend on: the runtime, the zoo and the benchmarks."""
    digest = hashlib.sha256()
    for top in ("ariadne", "model_zoo", "benchmarks"):
        for file in sorted((root / top).rglob("*.py")):
            if not file.name.startswith("test_"):
                digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _compiler() -> str:
    name = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return _first_line([name, "--version"]) if name else "none"


def _processors(file: Path = Path("/proc/stat")) -> list[int] | None:
    if not file.exists():
        return None
    user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, file.read_text().split()[1:9])
    return [user + nice + system + irq + softirq + stolen, stolen]


def _commit() -> str:
    return _first_line(["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "HEAD"])


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else "unknown"


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "unknown"
