"""Sizes that remember where they came from, so that a forward run on real tensors shows what it asked about its batch.

While such a run is recorded, `tensor.shape` holds followed numbers wherever a size follows the batch. They compute like any
other, and note every comparison: which then can be asked again for every other batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne.capture.followed import Ledger, Node, followed
from ariadne.plan import Batches, Expr, storage_of, where

Sources = tuple[str | None, ...]
_BOUNDS = (int, torch.SymInt, type(None))
UNKNOWN = "?"  # the source of a size that is another at each batch, in no way that is known


@dataclass
class Watch(Ledger):
    """The questions that forward asked about sizes, and the sources of the sizes that it can read.

    `sources[i]` gives, for the tensors that the i-th event made, each dim as an expression in the batch or None where it is
    constant.
    """

    sources: Sequence[Sequence[Sources]] = ()
    known: dict[int, Sources] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    following: set[int | None] = field(default_factory=set)  # the memory of tensors with a size that follows the batch

    def learn(self, event: int, tensors: Iterable[torch.Tensor]) -> None:
        """Tell it which tensors the event made."""
        if event < len(self.sources):
            for t, source in zip(tensors, self.sources[event], strict=False):
                self.tell(t, source)

    def tell(self, t: torch.Tensor, source: Sources) -> None:
        """Tell it where a tensor's sizes come from."""
        self.known[id(t)] = source
        if any(source):
            self.following.add(storage_of(t))

    def same(self, t: torch.Tensor, again: torch.Tensor) -> None:
        """Tell it of another tensor with the same sizes, which no op made."""
        if id(t) in self.known:
            self.known[id(again)] = self.known[id(t)]
            self.kept.append(again)

    def shape(self, t: torch.Tensor, shape: torch.Size) -> torch.Size:
        """The shape with its sizes made to remember."""
        found = self._sources(t, len(shape))
        if not any(found):
            return shape
        return torch.Size(n if s is None else self._size(n, s) for n, s in zip(shape, found, strict=True))

    def _sources(self, t: torch.Tensor, dims: int) -> Sources:
        """Where a tensor's sizes come from; of one that no op made, in the memory of one with the batch, nothing is known."""
        found = self.known.get(id(t))
        if found is None and storage_of(t) in self.following:
            self.lose("a tensor that no op made follows it")
        return found if found is not None and len(found) == dims else (None,) * dims

    def asks(self, t: torch.Tensor, shape: torch.Size, index: Sequence[Any]) -> None:
        """Ask what torch does of its own when it indexes: whether a slice reaches to the end, which it then skips.

        By indices of other kinds than torch's own, where they take several dims, nothing is known.
        """
        slices = [i for i, one in enumerate(index) if isinstance(one, slice) and one.stop is not None]
        if not slices:
            return
        sources = self._sources(t, len(shape))
        plain = all(one is None or one is Ellipsis or isinstance(one, (slice, *_BOUNDS, torch.Tensor)) for one in index)
        for i in slices:
            one, before, after = index[i], index[:i], index[i + 1 :]
            elided = any(each is Ellipsis for each in before)
            dim = len(shape) - 1 - sum(map(_dims, after)) if elided else sum(map(_dims, before))
            if not plain or not all(isinstance(n, _BOUNDS) for n in (one.start, one.stop, one.step)):
                if any(sources):
                    self.lose("an index of a kind of its own")
            elif (
                0 <= dim < len(shape) and (source := sources[dim]) and one.start in (None, 0) and one.step in (None, 1)
            ):
                _ = self._size(shape[dim], source) <= one.stop

    def _size(self, value: int, source: str) -> Any:
        if source == UNKNOWN:
            self.lose("a size follows it in no way that is known")
        return followed(Node(value, f"({source})", self))


def _dims(index: Any) -> int:
    """How many dims of a tensor an index takes."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
        return index.dim()
    return 1


def holding(watch: Watch, symbol: str, batches: Batches) -> tuple[Batches, list[str]]:
    """The batches for which every question has the answer it had, and why the others have not."""
    reasons: list[str] = []
    for question, answer in watch.questions.items():
        expr = Expr(question)
        if expr.names != {symbol}:
            continue
        holds = where(expr, symbol, answer, batches)
        if holds != batches:
            reasons.append(f"batch {batches - holds}: {question} is {answer}, and forward goes on from there")
            batches = holds
    return batches, reasons
