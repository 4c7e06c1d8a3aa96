"""World: what forward asks the machine, such as the time, or what a file holds. The next call may be told something else."""

from __future__ import annotations

import builtins
import datetime
import gc
import io
import os
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ariadne.guards.links import is_known

_MODULES = {
    time: "asctime clock_gettime clock_gettime_ns ctime gmtime localtime monotonic monotonic_ns perf_counter perf_counter_ns "
    "process_time process_time_ns strftime thread_time thread_time_ns time time_ns",
    os: "access getcwd getcwdb getloadavg getrandom listdir lstat open readlink scandir stat statvfs times urandom",
    io: "open open_code",
    gc: "get_count get_objects get_referrers get_stats isenabled",
    sys: "getrecursionlimit getrefcount getswitchinterval",
}
_OF_CLASSES = {datetime.date: ("today",), datetime.datetime: ("now", "today", "utcnow")}
# Who asks for no result's sake: what imports, what says something, and what shows how far something is.
_ASIDE = frozenset(
    "_frozen_importlib _frozen_importlib_external importlib inspect linecache logging tokenize tqdm traceback warnings "
    "zipimport".split()
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
class Asked:
    """A question: the function of forward's that has it asked, and the globals of the function that asks."""

    who: str
    table: dict[str, Any]


def asker(frame: FrameType) -> str:
    """The function of forward's that has such a call made, which may be by another's; "" where no result follows the answer."""
    found, at = "", frame
    while at is not None and (module := str(at.f_globals.get("__name__"))) != _ROOT:
        top = module.partition(".")[0]
        if top in _ASIDE:
            return ""
        if not found and (module in _READING or not is_known(at.f_globals)):
            found = at.f_code.co_name
        elif not found and top == "torch":
            return ""
        at = at.f_back  # type: ignore[assignment]
    return found
