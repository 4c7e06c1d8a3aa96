"""Sizes asked: what forward's Python reads of a tensor's sizes, by what stands in the place of torch's own, goes by a watch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ariadne.capture.disguise import disguise_type, watch_id
from ariadne.capture.followed import Size, following
from ariadne.capture.refusals import Patches, called_by_torch
from ariadne.capture.sizes import Watch


def patch_sizes(
    watch: Watch, mine: Callable[[], bool], patches: Patches, note_type: Callable[[torch.Tensor], None]
) -> None:
    """Let sizes be asked of the watch, in the thread and at the depth that is `mine`; `note_type` hears of a dtype that counts."""
    disguise_type(patches)
    watch_id(mine, patches, watch.lose)
    read_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]

    def shape(self: torch.Tensor) -> torch.Size:
        return watch.shape(self, read_shape(self)) if mine() else read_shape(self)

    def size(self: torch.Tensor, dim: int | None = None) -> Any:
        return shape(self) if dim is None else shape(self)[dim]

    def numel(self: torch.Tensor) -> Any:
        return math.prod(shape(self))

    def nbytes(self: torch.Tensor) -> Any:
        if mine() and not called_by_torch():
            note_type(self)
        return numel(self) * self.element_size()

    plain_length: Any = torch.Tensor.__len__

    def length(self: torch.Tensor) -> int:
        if mine() and self.dim() and isinstance(shape(self)[0], Size):
            watch.lose("__len__ makes a plain int of whatever it gets")
        return int(plain_length(self))

    def told_of(name: str) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if mine() and not called_by_torch():
                watch.lose(f"it reads {name}, which follows it in ways of its own")
                if name != "storage_offset":
                    note_type(self)
            return base(self, *args, **kwargs)

        return method

    get_item: Any = torch.Tensor.__getitem__
    set_item: Any = torch.Tensor.__setitem__

    def item(self: torch.Tensor, index: Any) -> Any:
        if mine() and isinstance(index, (tuple, list)):  # a slice alone is never skipped when it is read
            watch.asks(self, read_shape(self), index)
        return get_item(self, index)

    def put_item(self: torch.Tensor, index: Any, value: Any) -> None:
        if mine():
            watch.asks(self, read_shape(self), index if isinstance(index, (tuple, list)) else (index,))
        set_item(self, index, value)

    plain_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    def data(self: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = plain_data(self)
        if mine():
            watch.same(self, found)
        return found

    patches.set(torch.Tensor, "data", property(data, torch.Tensor.data.__set__))  # type: ignore[attr-defined]
    for name in ("storage_offset", "untyped_storage", "storage"):
        patches.set(torch.Tensor, name, told_of(name))
    patches.set(torch.Tensor, "__getitem__", item)
    patches.set(torch.Tensor, "__setitem__", put_item)
    patches.set(torch, "numel", numel)
    patches.set(torch.Tensor, "shape", property(shape))
    patches.set(torch.Tensor, "__len__", length)
    patches.set(torch.Tensor, "size", size)
    patches.set(torch.Tensor, "numel", numel)
    patches.set(torch.Tensor, "nelement", numel)
    patches.set(torch.Tensor, "nbytes", property(nbytes))
    for name in ("log", "log2", "log10", "sqrt", "isqrt", "gcd", "lcm", "pow", "exp"):
        patches.set(math, name, following(name, getattr(math, name)))
