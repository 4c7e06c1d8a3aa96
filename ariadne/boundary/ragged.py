"""Nested tensors, as the fast path of `nn.TransformerEncoder` makes them: a buffer, and where each part lies in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_WORD = 1 << 62


class Ragged:
    """Where a nested tensor lies in the buffer that crosses under `label`: sizes, strides and offset of each part, in elements.

    Not a dataclass, so that `ariadne.tree` takes it for the leaf that it is.
    """

    __slots__ = ("label", "offsets", "sizes", "strides")

    def __init__(self, label: str, sizes: Any, strides: Any, offsets: Any) -> None:
        self.label, self.sizes, self.strides, self.offsets = label, sizes, strides, offsets

    @classmethod
    def of(cls, label: str, t: torch.Tensor) -> Ragged:
        """That of a nested tensor whose buffer has this label."""
        sizes, strides = t._nested_tensor_size().tolist(), t._nested_tensor_strides().tolist()
        return cls(label, sizes, strides, t._nested_tensor_storage_offsets().tolist())

    @classmethod
    def read(cls, found: Any) -> Ragged:
        """That which `told` wrote; raises `ValueError` for anything else."""
        if type(found) is not tuple or len(found) != 4:
            raise ValueError("a nested tensor is a label, sizes, strides and offsets")
        label, sizes, strides, offsets = found
        tables = type(sizes) is list and type(strides) is list and len(sizes) == len(strides)
        if type(label) is not str or not tables or not _are_counts(offsets) or len(offsets) != len(sizes):
            raise ValueError("a nested tensor is a label, and as many sizes as strides and offsets")
        if not all(_are_counts(row) and len(row) == len(sizes[0]) for row in (*sizes, *strides)):
            raise ValueError("the parts of a nested tensor have sizes and strides, of one rank")
        return cls(label, sizes, strides, offsets)

    def told(self) -> tuple[Any, ...]:
        """What it is, in plain values."""
        return self.label, self.sizes, self.strides, self.offsets

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The nested tensor in a buffer; raises `ValueError` where a part lies outside of it."""
        if not self.sizes or buffer.dim() != 1 or buffer.stride() != (1,):
            raise ValueError("a nested tensor has parts, in a buffer of one dim")
        for sizes, strides, offset in zip(self.sizes, self.strides, self.offsets, strict=True):
            last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
            if 0 not in sizes and last >= buffer.numel():
                raise ValueError(f"a part of a nested tensor ends at {last} of {buffer.numel()} elements")
        tables = (torch.tensor(table, dtype=torch.int64) for table in (self.sizes, self.strides, self.offsets))
        found: torch.Tensor = torch._nested_view_from_buffer(buffer, *tables)
        return found.detach()


def buffer_of(t: torch.Tensor) -> torch.Tensor:
    """All the memory of a nested tensor, as a tensor of one dim."""
    count = t.untyped_storage().nbytes() // t.element_size()
    with torch.no_grad():
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), 0, (count,), (1,))


def sizes_of(t: torch.Tensor) -> list[Any]:
    """The sizes of a tensor, to be shown; of a nested one those of its parts."""
    found: list[Any] = t._nested_tensor_size().tolist() if t.is_nested else list(t.shape)
    return found


def _are_counts(values: Sequence[Any]) -> bool:
    return type(values) is list and all(type(n) is int and 0 <= n < _WORD for n in values)
