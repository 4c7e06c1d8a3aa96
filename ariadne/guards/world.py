"""World: what forward asks the machine, such as the time, or what a file holds. The next call may be told something else."""

from __future__ import annotations

import builtins
import datetime
import gc
import io
import os
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ariadne.guards.links import is_known

_MODULES = {
    time: "asctime clock_gettime clock_gettime_ns ctime gmtime localtime monotonic monotonic_ns perf_counter perf_counter_ns "
    "process_time process_time_ns strftime thread_time thread_time_ns time time_ns",
    os: "access fstat getloadavg listdir lstat open pread read readlink readv scandir stat statvfs times",
    io: "open open_code",
}
_OF_CLASSES = {datetime.date: ("today",), datetime.datetime: ("now", "today", "utcnow")}
# Who asks for no result's sake: what imports, what says something, and what shows how far something is.
_ASIDE = frozenset("inspect logging loguru rich tensorboard tqdm traceback wandb warnings zipimport".split())
_IMPORTING = frozenset(
    {"_frozen_importlib", "_frozen_importlib_external", "importlib", "importlib.metadata", "importlib.util"}
)
_ROOT = "ariadne.capture.observed"  # which calls forward
_READING = ("torch.serialization", "torch.hub")  # parts of torch that read for their callers


def _asked() -> dict[Any, str]:
    found = {}
    for module, names in _MODULES.items():
        for name in names.split():
            if (function := getattr(module, name, None)) is not None:  # not each system has all of them
                found[function] = f"{module.__name__}.{name}"
    for cls, methods in _OF_CLASSES.items():
        found |= {getattr(cls, name): f"datetime.{cls.__name__}.{name}" for name in methods}
    return {**found, builtins.open: "open"}


ASKED = _asked()


@dataclass(frozen=True)
class Question:
    """A question: the function of forward's that has it asked, and the globals of the functions that ask."""

    who: str
    tables: list[dict[str, Any]]


def asker(frame: FrameType) -> str:
    """The function of forward's that has such a call made, if by Python's own or torch's; "" where no result follows the answer."""
    at: FrameType | None = frame
    collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]  # who runs in the midst of forward
    while at is not None and (module := str(at.f_globals.get("__name__"))) != _ROOT:
        top = module.partition(".")[0]
        if (
            top in _ASIDE
            or module in _IMPORTING
            or module.startswith("importlib._bootstrap")
            or at.f_code in collecting
        ):
            return ""
        if module in _READING or not is_known(at.f_globals):
            return at.f_code.co_name
        if top == "torch":
            return ""
        at = at.f_back
    return ""
