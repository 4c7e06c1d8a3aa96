"""The environment of a run: what its results may depend on, besides the case."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from conformance.suite import device

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "torchvision", "timm", "ultralytics", "rfdetr", "transformers", "numpy")
TOPS = ("ariadne", "model_zoo", "conformance")  # whose code every result depends on
TARGETS = {"ariadne": "ariadne:prepare_split", "identity": "conformance.identity:prepare_split"}


@dataclass(frozen=True)
class Environment:
    """Versions, machine, target and sources of a run; `id` is a digest of the facts, the date left out."""

    date: str
    facts: dict[str, str]

    @classmethod
    def here(cls, target: str, date: str) -> Environment:
        """This process's environment; the packages that are not installed are left out."""
        cpu, flags = _cpu()
        facts = {
            "target": short(target),
            "python": platform.python_version(),
            "platform": sys.platform,
            "machine": platform.machine(),
            "cpu": cpu,
            "cpu_features": hashlib.sha256(flags.encode()).hexdigest()[:12],
            "simd": simd(flags),
        }
        for name in PACKAGES:
            try:
                facts[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return cls(date, facts | device.facts() | {"sources": sources(ROOT)} | _of_target(full(target)))

    @classmethod
    def parse(cls, record: dict[str, Any]) -> Environment:
        """The environment of such a record; ValueError if its digest is another."""
        found = cls(record["date"], record["facts"])
        if found.id != record["environment"]:
            raise ValueError(f"environment {record['environment']!r} does not fit its facts, which give {found.id!r}")
        return found

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, equal for environments whose results may stand side by side."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:12]

    def record(self) -> dict[str, Any]:
        """What a file of results holds of it."""
        return {"environment": self.id, "date": self.date, "facts": dict(sorted(self.facts.items()))}


def short(target: str) -> str:
    """A target's short name where it has one ("ariadne", "identity"), else the target as written."""
    return next((name for name, full in TARGETS.items() if full == target), target)


def full(target: str) -> str:
    """A target as `package.module:factory`."""
    return TARGETS.get(target, target)


def sources(root: Path) -> str:
    """A digest of the code that results depend on: the runtime, the zoo and the checks, without unit tests."""
    files = [file for top in TOPS for file in sorted((root / top).rglob("*.py"))]
    return _digest((file.relative_to(root).as_posix(), file) for file in files if not file.name.startswith("test_"))


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _of_target(target: str) -> dict[str, str]:
    """A digest of the code of a target from elsewhere: of the package or file that holds it."""
    top = target.partition(":")[0].partition(".")[0]
    found = None if top in TOPS else importlib.util.find_spec(top)
    if found is None or found.origin is None:
        return {}
    place = Path(found.origin)
    files = sorted(place.parent.rglob("*.py")) if found.submodule_search_locations else [place]
    return {"target_sources": _digest((file.name, file) for file in files)}


def simd(flags: str) -> str:
    """The widest instructions of such CPU flags for which torch has kernels on x86: "avx512", "avx2" or "other"."""
    found = set(flags.split())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= found:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= found else "other"


def _cpu() -> tuple[str, str]:
    """The processor's name and its features, which decide the kernels that a library chooses, hence the last bits."""
    cpuinfo = Path("/proc/cpuinfo")
    told = dict.fromkeys(("model name", "flags"), "")
    if cpuinfo.exists():
        for text in cpuinfo.read_text().partition("\n\n")[0].splitlines():
            key, _, value = text.partition(":")
            if key.strip() in told:
                told[key.strip()] = value.strip()
    return told["model name"] or platform.processor(), told["flags"]
