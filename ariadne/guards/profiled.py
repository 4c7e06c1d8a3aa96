"""Profiled: a block in which every Python function that starts is looked at, for what it reads outside of the model."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any

from ariadne.guards.around import Surroundings, of_numpy
from ariadne.guards.links import is_torchs_import
from ariadne.guards.readers import READS
from ariadne.guards.world import ASKED, Question, asker

_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_OURS: dict[int, CodeType] = {}  # functions of this package that were called while forward ran, by their ids


@contextmanager
def surroundings(
    mine: Callable[[], bool], belongs: Callable[[Any], bool], aside: Callable[[], AbstractContextManager[None]]
) -> Iterator[Surroundings]:
    """Look at every Python function that starts in the block, in this thread, while what runs is `mine`.

    To look is done `aside`. A profiler that is at work meanwhile sees nothing of the block.
    """
    found = Surroundings(belongs, of_numpy())
    quiet, shared = found.quiet, random.seed.__self__  # type: ignore[attr-defined]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if id(code) in _OURS:
            return
        if code.co_name == READS and event in ("call", "return"):
            found.reads.note(frame)
        if event == "call" and code.co_filename.startswith(_HERE):  # most calls are: they note what forward reads
            _OURS[id(code)] = code
        elif found.importing is not None:
            if event == "return" and frame is found.importing:
                found.importing = None
        elif event == "call":
            if frame.f_code.co_name == "<module>" and is_torchs_import(frame):
                found.importing = frame
            elif id(code) not in quiet and mine():
                with aside():
                    found.note(frame)
        elif event == "c_call":
            if getattr(argument, "__self__", None) is shared:
                found.drew.add("random")
            if found.asks(argument) and mine():
                with aside():
                    found.ask(argument, frame)

    with _profiling(profile) as lost:
        yield found
    found.deaf = bool(lost)


@contextmanager
def hearing(asked: Mapping[str, Question], heard: set[str]) -> Iterator[None]:
    """A block of which it is noted what it asks the machine again, in this thread. Nobody listens where nothing was asked."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument in ASKED and asker(frame):
            heard.add(ASKED[argument])

    with _profiling(profile) if asked else nullcontext():
        yield


@contextmanager
def _profiling(profile: Callable[[FrameType, str, Any], None]) -> Iterator[list[object]]:
    """A block under a profiler; what is given is empty unless the block has put another in its place."""
    before, lost = sys.getprofile(), list[object]()
    sys.setprofile(profile)
    try:
        yield lost
    finally:
        if sys.getprofile() is not profile:
            lost.append(sys.getprofile())
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # one in C, such as cProfile's: only it can put itself back
            sys.setprofile(None)
            getattr(before, "enable", lambda: None)()
