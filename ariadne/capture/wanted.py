"""Which tensors want a gradient: forward may say so of what it makes, and of nothing that was there before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches, called_by_torch, is_wrapped
from ariadne.errors import UnsupportedError
from ariadne.plan import Region, storage_of, tensors_in

TELL = torch.ops.aten.requires_grad_.default


def tell(recorder: Recorder, given: Any, region: Region | None = None) -> None:
    """Note that tensors were made leaves that require grad, by `nn.Parameter(h.detach())` and the like, for a function of Python's.

    Which of its parameters get a gradient may hang on that; what ops make does not.
    """
    for t in tensors_in(given):
        with recorder.aside():
            made = id(t) in recorder.own or (type(t) is nn.Parameter and storage_of(t) not in recorder.state)
            leaf = made and not is_wrapped(t) and t.is_leaf and t.requires_grad and not t._is_view()
        if leaf:
            recorder.add(TELL, (t, True), t, region=region)


def patch(recorder: Recorder, patches: Patches) -> None:
    """Let `requires_grad_()`, and an assignment to `requires_grad`, be refused of inputs, and of the model's tensors if it
    changes anything: a plan has no op for it, and it stays once the call is over. Else the plan holds for these flags alone."""
    plain: Any = torch.Tensor.requires_grad_
    asked: Any = vars(torch.Tensor)["requires_grad"]

    def refuse(t: torch.Tensor, value: bool) -> None:
        if not recorder.is_mine() or id(t) in recorder.own or is_wrapped(t):
            return
        of_model = storage_of(t) in recorder.state
        if of_model and asked.__get__(t) == bool(value):
            recorder.recording.looked.add("requires_grad")
            return
        if not of_model and (recorder.fake is not None or called_by_torch(3)):
            return
        todo = (
            "set it before the call, as a first call of the model does, model(*example_inputs)"
            if of_model
            else "pass x.requires_grad_(), or compute with x.detach().requires_grad_()"
        )
        raise UnsupportedError(
            f"forward sets requires_grad of {'a tensor of the model' if of_model else 'an input'} in {recorder.where()}, which no "
            f"plan does, and which would stay after the call; {todo}"
        )

    def note(t: torch.Tensor, value: bool) -> None:
        """What forward made may require grad anyway, and may not once a part before it is frozen: it is told each time."""
        if recorder.is_mine() and id(t) in recorder.own and not is_wrapped(t):
            recorder.add(TELL, (t, bool(value)), t)

    def requires_grad_(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        refuse(self, requires_grad)
        found: torch.Tensor = plain(self, requires_grad)
        note(self, requires_grad)
        return found

    def put(self: torch.Tensor, value: bool) -> None:
        refuse(self, value)
        asked.__set__(self, value)
        note(self, value)

    patches.set(torch.Tensor, "requires_grad_", requires_grad_)
    patches.set(torch.Tensor, "requires_grad", property(asked.__get__, put))
