"""Drawn: which of the process's random generators forward drew from, and not another thread.

They are every thread's. What moved torch's is told by the ops; what moved Python's own, by the calls that a profile sees in the
thread of forward. It sees none of numpy's, whose methods are no functions of Python's C: there forward counts if a name in its code
leads to one of them, or if nobody else is seen to draw.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from ariadne.capture.generators import NUMPY, PYTHON, TORCH, moved_of_python, states
from ariadne.capture.state import Snapshot
from ariadne.guards import Recording

_WAITED = 0.2  # seconds in which another thread that draws from numpy's is to do so again
_PAUSE = 5e-4
_SETTING = frozenset({"set_state", "manual_seed", "seed", "set_offset", "graphsafe_set_state", "setstate"})


def drawn_from(found: Recording, snapshot: Snapshot) -> list[str]:
    """Those of Python's and numpy's own that a recorded run drew from since the last opaque part, which may draw."""
    moved = snapshot.moved_rng(found.numbers)
    if threading.active_count() == 1:
        return moved
    return [name for name in moved if name in found.drew or (name == NUMPY and not others_draw_from_numpy(found))]


def put_back(snapshot: Snapshot, found: Recording | None) -> None:
    """Let all be as it was before a run, as far as that came: of random generators those that it drew from, and no other thread."""
    if found is None:
        snapshot.restore()
        return
    names = {*found.drew, *drawn_from(found, snapshot)}
    if found.disturbed:
        names.discard(TORCH)
    if NUMPY in names and others_draw_from_numpy(found):
        names.discard(NUMPY)
    snapshot.restore(names)


def others_draw_from_numpy(found: Recording) -> bool:
    """Whether numpy's generator moves while forward does not run; asked once for each run."""
    if found.beside is None:
        found.beside = moves_by_others(NUMPY)
    return found.beside


def moves_by_others(name: str) -> bool:
    """Whether one of torch's and numpy's moves while forward does not run."""
    stood, until = states(), time.monotonic() + _WAITED
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(_PAUSE)
        if not torch.equal(states()["torch"], stood["torch"]) if name == TORCH else name in moved_of_python(stood):
            return True
    return False


def _of_torch() -> tuple[torch.Generator, ...]:
    """The process's own, of each device."""
    return torch.default_generator, *torch.cuda.default_generators


@contextmanager
def noted(into: set[str]) -> Iterator[None]:
    """Add to the set those of Python's and numpy's own that the block draws from in this thread, and those of Python's own and
    torch's that it sets there, though it may leave them as they were.

    Under a profiler of the user's, Python's own counts if it moved, whoever drew.
    """
    stood, before, shared = states(), sys.getprofile(), random.seed.__self__  # type: ignore[attr-defined]
    beside = threading.active_count() > 1
    drew = before is not None

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal drew
        of = getattr(argument, "__self__", None) if event == "c_call" else None
        drew |= of is shared
        if (of is shared or isinstance(of, torch.Generator)) and argument.__name__ in _SETTING:
            into.update([PYTHON] if of is shared else [TORCH] if any(of is one for one in _of_torch()) else [])

    if beside and not drew:
        sys.setprofile(profile)
    try:
        yield
    finally:
        if sys.getprofile() is profile:
            sys.setprofile(None)
        for name in moved_of_python(stood):
            if not beside or (drew if name == PYTHON else not moves_by_others(name)):
                into.add(name)
