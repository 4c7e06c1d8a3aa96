"""Profiled: a block in which every Python function that starts is looked at, for what it reads outside of the model."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any

from ariadne.guards.around import Surroundings, of_numpy
from ariadne.guards.links import is_torchs_import
from ariadne.guards.readers import READS

_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_OURS: dict[int, CodeType] = {}  # functions of this package that were called while forward ran, by their ids


@contextmanager
def surroundings(
    mine: Callable[[], bool], belongs: Callable[[Any], bool], aside: Callable[[], AbstractContextManager[None]]
) -> Iterator[Surroundings]:
    """Look at every Python function that starts in the block, in this thread, while what runs is `mine`.

    To look is done `aside`. A profiler that is at work meanwhile sees nothing of the block.
    """
    found, before = Surroundings(belongs, of_numpy()), sys.getprofile()
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

    sys.setprofile(profile)
    try:
        yield found
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # one in C, such as cProfile's: only it can put itself back
            sys.setprofile(None)
            getattr(before, "enable", lambda: None)()
