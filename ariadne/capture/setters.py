"""Setters: what forward puts into a tensor by no op: its data, or a function of Python's over them, or its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches, is_wrapped
from ariadne.errors import UnsupportedError
from ariadne.plan import storage_of

_BY_ELEMENT = ("apply_", "map_", "map2_")
_IN_PLACE = "write into it by an op, as `t.data.copy_(...)` and `t.data.clamp_(...)` are"


def patch(recorder: Recorder, patches: Patches) -> None:
    """Refuse `t.data = ...`, `t.apply_(...)` and the like, and `p.grad = ...`, whether they change anything here or not.

    What was within its bounds already when the split was prepared may be beyond them at a later call, and a plan has no op for it.
    To put the very memory there that stands there changes nothing ever. What `t.data` gives of a tensor that no op made is noted.
    """

    def refuse(what: str, instead: str) -> None:
        raise UnsupportedError(f"forward {what} in {recorder.where()}, which no op shows; {instead}")

    data: Any = torch._C.TensorBase.data
    got: Any = torch.Tensor.data  # with who looks on already
    gradient: Any = torch._C.TensorBase.grad

    def get_data(self: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = got.__get__(self)
        if recorder.is_mine() and id(self) not in recorder.own and not is_wrapped(self):
            recorder.recording.data_of[id(found)] = found, self
        return found

    def put_data(self: torch.Tensor, value: Any) -> None:
        if recorder.is_mine():
            with recorder.aside():
                same = _is_same_memory(self, value)
            if same:
                return
            refuse("puts other data in the place of a tensor's (`t.data = ...`)", _IN_PLACE)
        data.__set__(self, value)

    def put_gradient(self: torch.Tensor, value: Any) -> None:
        if recorder.is_mine() and not is_wrapped(self) and storage_of(self) in recorder.state:
            refuse("sets the gradient of a tensor of the model", "do it between calls")
        gradient.__set__(self, value)

    def drop_gradient(self: torch.Tensor) -> None:
        put_gradient(self, None)

    def by_element(name: str) -> Callable[..., Any]:
        plain = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_mine():
                refuse(f"changes a tensor's elements by a function of Python's (`{name}`)", "write it with torch's ops")
            return plain(self, *args, **kwargs)

        return method

    asked: Any = vars(torch.Tensor)["grad"]  # with who looks on already
    patches.set(torch.Tensor, "data", property(get_data, put_data))
    patches.set(torch.Tensor, "grad", property(asked.__get__, put_gradient, drop_gradient))
    for name in _BY_ELEMENT:
        patches.set(torch.Tensor, name, by_element(name))


def _is_same_memory(t: torch.Tensor, value: Any) -> bool:
    """Whether a tensor is another's memory, in all of its sizes and strides."""
    if not isinstance(value, torch.Tensor) or is_wrapped(t) or is_wrapped(value):
        return False
    if storage_of(t) is None or storage_of(t) != storage_of(value):
        return False
    one, other = ((x.dtype, x.shape, x.stride(), x.storage_offset()) for x in (t, value))
    return one == other
