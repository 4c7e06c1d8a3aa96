"""Threads: what forward has other threads do, which no recording sees: those that it starts, and those of a pool.

A plan runs none of it. What such a thread computes and hands back is noticed as data from nowhere; here it is noticed if it draws
random numbers, or writes into a tensor that it did not make.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._ops import OpOverload

from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches
from ariadne.capture.written import Looking
from ariadne.errors import UnsupportedError
from ariadne.guards import Recording
from ariadne.plan import bind, storage_of, tensors_in, written_arguments


def patch(recorder: Recorder, patches: Patches) -> None:
    """Note in `Recording.elsewhere` what other threads do for forward that a plan would miss."""
    if recorder.fake is not None:
        return
    plain_start: Any = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if recorder.is_mine():
            self.run = _looked_at(self.run, recorder)  # type: ignore[method-assign]
        plain_start(self)

    patches.set(threading.Thread, "start", start)
    pools = sys.modules.get("concurrent.futures.thread")
    if pools is None:
        return
    plain_submit: Any = pools.ThreadPoolExecutor.submit

    def submit(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_mine():
            return plain_submit(self, function, *args, **kwargs)
        with recorder.aside():  # a worker that it starts for this serves others after it
            return plain_submit(self, _looked_at(function, recorder), *args, **kwargs)

    patches.set(pools.ThreadPoolExecutor, "submit", submit)


def refuse_elsewhere(found: Recording) -> None:
    """Raise `UnsupportedError` for what forward had another thread do."""
    if found.elsewhere:
        raise UnsupportedError(
            f"forward has another thread run {found.elsewhere}: a plan has no threads. Do it in the thread that calls forward, or "
            "before the call"
        )


def _looked_at(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    recording, where = recorder.recording, recorder.where()

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Elsewhere(recording, where):
            return function(*args, **kwargs)

    return run


class _Elsewhere(Looking):
    """Looks at the ops of a thread."""

    def __init__(self, recording: Recording, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.where = recording, where
        self.made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # by memory, a tensor that has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            bound = bind(func, args, kwargs)
            written = (t for i in written_arguments(func, bound) for t in tensors_in(bound[i]))
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.note(f"{func} in {self.where}, which draws random numbers")
            elif any(storage_of(t) not in self.made for t in written):
                self.note(f"{func} in {self.where}, which writes into a tensor that the thread did not make")
        others = {storage_of(t) for t in tensors_in((args, tuple(kwargs.values())))} - {*self.made.keys()}
        out = func(*args, **kwargs)
        for t in tensors_in(out):
            key = storage_of(t)
            if key is not None and key not in others:
                self.made.setdefault(key, t)  # not a view of it, which may go before it does
        return out

    def note(self, what: str) -> None:
        """Keep the first of these."""
        self.recording.elsewhere = self.recording.elsewhere or what
