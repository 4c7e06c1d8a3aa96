"""A fake runner for the tests of the engine: the name of a check says what becomes of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from conformance.suite.cases import Case
from conformance.suite.statuses import Finding, Status, Stop

RUNNER = "conformance.unit.engine_kit:open_fake"


def open_fake(model: str, target: str) -> tuple[str, Callable[[Case], Finding]]:
    """Open a model by name: `nn/stops`, `nn/raises` and `nn/hangs` can't be opened; `nn/medium` has that cost tag."""
    if model == "nn/stops":
        raise Stop(Status.NOT_INSTALLED, "timm is not installed", package="timm")
    if model == "nn/raises":
        raise ArithmeticError("no such model")
    if model == "nn/hangs":
        time.sleep(60)
    return ("medium" if model == "nn/medium" else "cheap"), lambda case: BEHAVIOURS[case.check](case)


def exits(case: Case) -> Finding:
    print("last words", flush=True)
    os._exit(3)


def segfaults(case: Case) -> Finding:
    ctypes.string_at(0)
    raise AssertionError("it should be dead")


def killed(case: Case) -> Finding:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it should be dead")


def hangs(case: Case) -> Finding:
    time.sleep(60)
    return Finding(Status.PASS)


def allocates(case: Case) -> Finding:
    held = []
    while len(held) < 64:
        held.append(b"x" * (1 << 26))
        time.sleep(0.02)
    return Finding(Status.PASS)


def process(case: Case) -> Finding:
    return Finding(Status.PASS, facts={"pid": os.getpid(), "inf": float("inf"), "path": Path("x")})


def naps(case: Case) -> Finding:
    time.sleep(0.5)
    return Finding(Status.PASS)


def starts(case: Case) -> Finding:
    return Finding(
        Status.PASS, facts={"child": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid}
    )


BEHAVIOURS: dict[str, Callable[[Case], Finding]] = {
    "passes": lambda case: Finding(Status.PASS),
    "fails": lambda case: Finding(Status.FAIL_ACCURACY, "values differ", {"op": 3}),
    "exits": exits,
    "segfaults": segfaults,
    "killed": killed,
    "hangs": hangs,
    "allocates": allocates,
    "process": process,
    "naps": naps,
    "starts": starts,
}
