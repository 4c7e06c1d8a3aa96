"""`ariadne doctor`: what this machine has, and what of Ariadne works on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ariadne.check import check, passed
from ariadne.cli.output import FAILED, OK, Answer, progress, table
from ariadne.guards import VERSION
from ariadne.prepare import prepare_split

OPTIONAL = ("numpy", "torchvision", "timm", "ultralytics", "rfdetr", "transformers", "graphviz", "pyzmq", "onnx")
NEEDED_FOR = {"pyzmq": "two machines", "onnx": "exporting a half as .onnx"}
Row = tuple[str, str, str]  # what, its state, and more words


def run(options: Namespace) -> Answer:
    """Look around, and try; a failed trial makes the status 1."""
    rows = [*_torch(), *_devices(), *_programs(), *_packages()]
    with progress("splitting a tiny model ..."):
        trials = [_tried("split and train", _splits)]
    if options.compile:
        with progress("compiling a tiny split ..."):
            trials.append(_tried("compile", _compiles))
    else:
        trials.append(("compile", "not tried", "ariadne doctor --compile tries it"))
    failed = [what for what, state, _ in trials if state == "FAIL"]
    verdict = f"does not work here: {', '.join(failed)}" if failed else "works here"
    text = table(["what", "state", ""], [*rows, *trials])
    data = {
        "rows": [{"what": what, "state": state, "detail": detail} for what, state, detail in [*rows, *trials]],
        "failed": failed,
    }
    return Answer(f"{text}\n\nariadne {verdict}", data, FAILED if failed else OK)


def _torch() -> Iterator[Row]:
    yield "ariadne", "ok", _version("ariadne-runtime") or "not installed, run from a folder"
    yield "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    version: Any = torch.version
    build = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "CPU"
    yield "torch", "ok", f"{torch.__version__}, built for {build}{', debug' if version.debug else ''}"
    yield (
        "threads",
        "ok",
        f"{torch.get_num_threads()} in an op, {torch.get_num_interop_threads()} between; {os.cpu_count()} CPUs",
    )
    if VERSION is not None:
        yield "guards", "ok", "a call asks for versions of dicts, and compares only after a write"
    else:
        yield (
            "guards",
            "slower",
            "no versions of dicts under this Python: each call compares everything; 3.11 and 3.12 have them",
        )


def _devices() -> Iterator[Row]:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            yield f"cuda:{i}", "ok", f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
    else:
        yield "cuda", "none", "no CUDA device; all works on the CPU"
    if torch.backends.mps.is_available():
        yield "mps", "ok", "Apple GPU"


def _programs() -> Iterator[Row]:
    wanted = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((path for name in wanted if name and (path := shutil.which(name))), None)
    if found is None:
        yield "C++ compiler", "none", "mode='compiled' needs one on CPU: install g++ or clang++, or set CXX"
    else:
        yield "C++ compiler", "ok", f"{found}: {_said(found, '--version')}"
    dot = shutil.which("dot")
    if dot is None:
        yield "Graphviz", "none", "drawings as SVG, PNG and PDF need the program `dot`; DOT text does not"
    else:
        yield "Graphviz", "ok", f"{dot}: {_said(dot, '-V')}"


def _packages() -> Iterator[Row]:
    for name in OPTIONAL:
        version = _version(name)
        wanted = f", for {NEEDED_FOR[name]}" if name in NEEDED_FOR else ""
        yield name, "ok" if version else "none", version or f"optional{wanted}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(program: str, option: str) -> str:
    """The first line that a program says of itself."""
    try:
        done = subprocess.run([program, option], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"could not be run: {error}"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines else ""


def _tried(what: str, trial: Callable[[], str]) -> Row:
    start = time.perf_counter()
    try:
        words = trial()
    except Exception as error:  # whatever it is, it is what the user wants to know
        return what, "FAIL", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return what, "ok", f"{words}, in {time.perf_counter() - start:.1f} s"


def tiny() -> nn.Module:
    """The model that is tried."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def _splits() -> str:
    results = check(tiny(), (torch.randn(4, 8),), cuts=("every",), batches=(2, 5), steps=2)
    if not passed(results):
        bad = next((r for r in results if r.status not in ("pass", "skipped")), results[0])
        raise RuntimeError(f"{bad.check} at {bad.split_id}, batch {bad.batch}: {bad.detail}")
    return f"{len(results)} checks passed: a tiny model, split everywhere, replayed and trained, equals itself whole"


def _compiles() -> str:
    model, x = tiny().eval(), torch.randn(4, 8)
    runtime = prepare_split(model, (x,), split="percent:50", mode="compiled")
    found = runtime.run_suffix(runtime.run_prefix(x))
    with torch.no_grad():
        gap = float((model(x) - found).abs().max())
    if not gap < 1e-4:
        raise RuntimeError(f"the compiled split is off by {gap}")
    return f"a tiny split, compiled, {f'is within {gap:.0e} of' if gap else 'equals'} the model"
