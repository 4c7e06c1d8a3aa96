"""Taken: where Python takes all of a tensor's data, as a list, an array or text, so that a plan holds while they are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches, called_by_torch, refuse_history
from ariadne.capture.written import Undone
from ariadne.errors import UnsupportedError
from ariadne.plan import WHOLE, storage_of

LIST, ARRAYS, TEXTS = "tolist", ("numpy", "__array__"), ("__repr__", "__format__")


@contextmanager
def counted(undone: Undone) -> Iterator[None]:
    """Within the block it is counted, too, how often this thread takes all of a tensor's data, as `patch` notes it."""
    patches, thread = Patches(), threading.get_ident()

    def counting(base: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return base(self, *args, **kwargs)
            undone.asked[WHOLE] += not undone.reading
            undone.reading += 1
            try:
                return base(self, *args, **kwargs)
            finally:
                undone.reading -= 1

        return method

    try:
        for name in (LIST, *ARRAYS, *TEXTS):
            patches.set(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
        yield
    finally:
        patches.restore()


def patch(recorder: Recorder, patches: Patches) -> None:
    """Note each tensor of which forward takes all data, with what these were."""
    mine = recorder.is_mine

    def taken_out(name: str, lends: bool = False) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not mine():
                return base(self, *args, **kwargs)
            with recorder.aside():
                out = base(self, *args, **kwargs)
                # A tensor from outside has data, though the run be on fake ones.
                with nullcontext() if isinstance(self, FakeTensor) else unset_fake_temporarily():
                    seen = self.detach().clone()
                    if lends and not isinstance(self, FakeTensor):
                        recorder.writes.lend(self, recorder.where())
            recorder.add(WHOLE, (self, seen), None)
            return out

        return method

    def told(name: str) -> Callable[..., Any]:
        by_data = taken_out(name)
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not mine() or called_by_torch():
                return base(self, *args, **kwargs)
            if isinstance(self, FakeTensor):
                raise UnsupportedError(
                    f"forward makes text of a tensor's data in {recorder.where()}, and here it has none"
                )
            if self.requires_grad and storage_of(self) not in recorder.state:  # the text says so, and what made it
                refuse_history(self, "grad_fn", recorder.recording, recorder.where())
            recorder.recording.looked.add("requires_grad")
            return by_data(self, *args, **kwargs)

        return method

    patches.set(torch.Tensor, LIST, taken_out(LIST))
    for name in ARRAYS:
        patches.set(torch.Tensor, name, taken_out(name, lends=True))
    for name in TEXTS:
        patches.set(torch.Tensor, name, told(name))
