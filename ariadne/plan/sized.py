"""Sizes beside the batch: which dims of which inputs may change, under what symbol, and how far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ariadne.errors import InputError

MOST = 2**31  # a size without a range of its own lies below


@dataclass(frozen=True, slots=True)
class Size:
    """One dim of one input that may change: dim `dim` of the input leaf `leaf`, which forward calls `input`.

    `symbol` is what it is called; dims of one symbol have one size. `within`: the sizes that it may have.
    """

    leaf: int
    dim: int
    symbol: str
    within: range
    input: str

    @property
    def told(self) -> list[Any]:
        """It as JSON-able data; forward's name for the input decides nothing."""
        return [self.leaf, self.dim, self.symbol, self.within.start, self.within.stop, self.within.step]

    @property
    def range(self) -> str:
        """The sizes that it may have, in words.

        >>> Size(0, 2, "H", range(64, 513, 32), "x").range
        '64 to 512 in steps of 32'
        """
        steps = f" in steps of {self.within.step}" if self.within.step > 1 else ""
        high = self.within[-1]
        return f"{self.within.start} or more" if high == MOST - 1 else f"{self.within.start} to {high}{steps}"


def sizes_in(sizes: Iterable[Size], leaves: Sequence[Any]) -> dict[str, int]:
    """The size of each symbol in inputs; raises `InputError` where one lies outside of its range, or two that share it differ."""
    found: dict[str, tuple[int, Size]] = {}
    for size in sizes:
        leaf = leaves[size.leaf]
        if not isinstance(leaf, torch.Tensor) or leaf.dim() <= size.dim:
            continue  # which is told as what it is
        now = int(leaf.shape[size.dim])
        known, first = found.setdefault(size.symbol, (now, size))
        if now != known:
            raise InputError(
                f"dim {first.dim} of {first.input!r} and dim {size.dim} of {size.input!r} share the size {size.symbol}; found "
                f"{known} and {now}. Pass inputs of one size, or give each a symbol of its own in `dynamic`"
            )
        if now not in size.within:
            raise InputError(
                f"dim {size.dim} of {size.input!r} is the size {size.symbol}, declared as {size.range}; found {now}. Resize "
                "the input, or prepare for more sizes"
            )
    return {symbol: now for symbol, (now, _) in found.items()}


def sizes_at(sizes: Iterable[Size], at: Sequence[int | None]) -> tuple[Size, ...]:
    """The same of a call whose leaves are these ones of the example's; without those of leaves that it does not have."""
    return tuple(replace(size, leaf=at.index(size.leaf)) for size in sizes if size.leaf in at)
