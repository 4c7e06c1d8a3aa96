"""What native code of one kernel relies on: types, sizes, layouts, the batch; all of it is checked here, before it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ariadne.compiled.graphs import extent
from ariadne.guards import alike
from ariadne.plan import Batches, Expr


@dataclass(frozen=True)
class Layout:
    """What a package relies on for one input: its type, its sizes, and the order of its dims in memory, where it lies dense.

    A size that follows data is None, and at least 2.
    """

    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    sizes: tuple[int | Expr | None, ...]

    @classmethod
    def of(cls, t: torch.Tensor, sizes: Sequence[int | Expr | None]) -> Layout:
        """The layout nearest to how a tensor lies."""
        strides = t.stride()
        order = sorted(range(t.dim()), key=lambda d: (-strides[d], d))
        return cls(t.dtype, t.device, tuple(order), tuple(sizes))

    def equals(self, t: torch.Tensor) -> bool:
        """Whether a tensor is of this type, and has its dims in this order in memory."""
        return Layout.of(t, self.sizes) == self

    def at(self, env: Mapping[str, int]) -> tuple[int | None, ...]:
        """The sizes at a batch."""
        return tuple(n.evaluate(env) if isinstance(n, Expr) else n for n in self.sizes)

    def strides(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The strides of a tensor of these sizes."""
        found, step = [0] * len(sizes), 1
        for d in reversed(self.order):
            found[d], step = step, step * max(1, sizes[d])
        return tuple(found)

    def takes(self, t: torch.Tensor, sizes: tuple[int | None, ...]) -> bool:
        """Whether a tensor is of this type and these sizes, which are those of `at`; `lay` sees to the rest."""
        if t.dtype != self.dtype or t.device != self.device:
            return False
        if t.shape == sizes:
            return True
        return (
            None in sizes
            and t.dim() == len(sizes)
            and all(a >= 2 if n is None else a == n for a, n in zip(t.shape, sizes, strict=True))
        )

    def lay(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy that lies as it should."""
        strides = self.strides(t.shape)
        if all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True)) and _aligned(t):
            return t
        return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

    def to_json(self) -> list[Any]:
        """As JSON-able data."""
        return [str(self.dtype), str(self.device), list(self.order), [str(n) for n in self.sizes]]


def _aligned(t: torch.Tensor) -> bool:
    """Whether a tensor begins where native code takes it to."""
    return not t.is_cuda or t.data_ptr() % 16 == 0


def _moved(t: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor does, overlaps included, and begins where native code takes it to."""
    return t.as_strided((extent(t),), (1,)).clone().as_strided(t.shape, t.stride()) if t.numel() else t.clone()


def lies(t: torch.Tensor) -> tuple[Any, ...]:
    """What a package relies on for a tensor of the model's: it is compiled for how this one lies."""
    return t.dtype, t.device, t.shape, t.stride()


class Package:
    """Native code for one kernel, the batches that it serves, and what it relies on."""

    def __init__(self, run: Callable[[list[torch.Tensor]], Any], batches: Batches, symbol: str, inputs: tuple[Layout, ...],
                 state: Sequence[torch.Tensor], ambient: Any) -> None:  # fmt: skip
        self.run, self.batches, self.symbol, self.inputs, self.ambient = run, batches, symbol, inputs, ambient
        self.sizes: dict[int, list[tuple[int | None, ...]]] = {}
        self.state = [lies(t) for t in state]
        self.plain = tuple(layout.order == tuple(range(len(layout.order))) for layout in inputs)
        self.unchanged = alike(state)
        # On the CPU all memory is aligned; on CUDA a tensor's data may be put elsewhere while it stays the same tensor.
        self.cuda = any(t.is_cuda for t in state)

    def fits(self, batch: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether it serves this batch, with inputs of these types and sizes."""
        sizes = self.sizes.get(batch)
        if sizes is None:
            if batch not in self.batches:
                return False
            sizes = self.sizes[batch] = [layout.at({self.symbol: batch}) for layout in self.inputs]
        return all(map(Layout.takes, self.inputs, inputs, sizes))

    def follows(self, state: Sequence[torch.Tensor]) -> bool:
        """Whether the model's tensors, where they are others by now, lie as those that it was compiled for."""
        if self.unchanged(*state):
            return True
        same = [lies(t) for t in state] == self.state
        if same:
            self.unchanged = alike(state)
        return same

    def __call__(self, inputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> Any:
        given = [
            t if plain and t.is_contiguous() and not t.is_cuda else layout.lay(t)
            for t, plain, layout in zip(inputs, self.plain, self.inputs, strict=True)
        ]
        return self.run([*given, *((t if _aligned(t) else _moved(t) for t in state) if self.cuda else state)])
