"""Ran: which ops a run of forward called, on which numbers, so that two runs are told apart where their results are not.

A result may follow nothing of what led to it: behind a `relu` or a dropout that leaves zeros alone, in an index of the largest, in
a list of boxes that is empty. What forward keeps for later calls is a cache where a later call does the same as the first, or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ariadne import tree
from ariadne.compare import bits, difference
from ariadne.plan import own, storage_of, tensors_in

_MOST = 4096  # elements of a tensor whose numbers are looked at
_aten = torch.ops.aten
_COPIES = frozenset(
    {
        *(_aten.clone.default, _aten._to_copy.default, _aten.index.Tensor, _aten.index_select.default),
        *(_aten.gather.default, _aten.embedding.default, _aten.take.default),
    }
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, complex, str, torch.dtype)
_Key = tuple[Any, ...]
_SCRIPTED: ContextVar[bool] = ContextVar("scripted", default=False)


@contextmanager
def by_results_alone(scripted: bool) -> Iterator[None]:
    """While in the block, runs are told apart by their results alone if forward calls functions under `torch.jit.script`.

    These run other ops each time until they are warm.
    """
    token = _SCRIPTED.set(scripted)
    try:
        yield
    finally:
        _SCRIPTED.reset(token)


class Ran:
    """The ops of a run, with their numbers and those of the small tensors that they read, each as often as it was called.

    `answers`: the bools that Python read in tensors, by which its path may go.
    """

    def __init__(self) -> None:
        self.ops: list[_Key] = []
        self.answers: list[bool] = []
        self._sources: list[list[int]] = []  # of each op, those that made or wrote what it reads
        self._last: dict[int | None, int] = {}  # by memory, the op that made or wrote it last
        self._leading: set[int] | None = None

    def key(self, op: OpOverload, bound: tuple[Any, ...]) -> _Key:
        """What tells this call from others; before it runs, for it may write what it reads."""
        if _moves(op):
            return ()
        # What is written, or looked at in another shape, may hold anything: as what `torch.empty` gives does.
        read = (v for v, a in zip(bound, op._schema.arguments, strict=True) if a.alias_info is None)
        return op, *(_told(leaf) for value in read for leaf in tree.leaves(value))

    def note(self, key: _Key, given: Any, written: Any, out: Any) -> None:
        """An op ran with these tensors, wrote some of them, and gave that."""
        if isinstance(out, bool):
            self.answers.append(out)
        read, at = {storage_of(t) for t in given}, len(self.ops)
        self.ops.append(key)
        self._sources.append([self._last[memory] for memory in read if memory in self._last])
        made = {storage_of(t) for t in tensors_in(out)} - read
        for memory in made.union(map(storage_of, written)) - {None}:
            self._last[memory] = at

    def leads_to(self, output: Any) -> None:
        """That is what it gave."""
        todo = [self._last[m] for t in tensors_in(output) if (m := storage_of(t)) in self._last]
        found = set[int]()
        while todo:
            if (at := todo.pop()) not in found:
                found.add(at)
                todo += self._sources[at]
        self._leading = found

    def beyond(self, first: Ran) -> str | None:
        """An op that a result follows, and that did not run, or not as often, in the first run; None where there is none, or it
        can't be told."""
        if _SCRIPTED.get():
            return None
        leading = range(len(self.ops)) if self._leading is None else self._leading
        mine = Counter(self.ops[at] for at in sorted(leading) if self.ops[at])
        more = next(iter(mine - Counter(filter(None, first.ops))), None)
        return None if more is None else f"it runs {_words(more)}, which it did not before"


@dataclass(frozen=True)
class Answer:
    """What a run of forward gave, or the name of what it raised; and what it `ran`."""

    output: Any
    ran: Ran

    def differs(self, later: Answer) -> str | None:
        """What a later run gives otherwise than this one, or does that this one did not; None where it is the same."""
        return difference(self.output, later.output) or later.ran.beyond(self.ran)


def detached(value: Any) -> Any:
    """The same with copies of the tensors in it, which have no graph, and which no later write reaches."""
    return tree.map_leaves(lambda leaf: own(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf, value)


@cache
def _moves(op: OpOverload) -> bool:
    """Whether an op only shows what it is given in another way, or copies it, or some of it: of a table that may be longer."""
    schema = op._schema
    shows = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return op in _COPIES or shows


def _told(leaf: Any) -> Any:
    """What tells a value from others: of a small tensor, its numbers, in any order."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(leaf) if isinstance(leaf, _NUMBERS) else None
    small = type(leaf) in _PLAIN and leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_nested
    if not small or not 0 < leaf.numel() <= _MOST or leaf.is_quantized:
        return torch.Tensor
    return torch.Tensor, leaf.dtype, int(bits(leaf).sum(dtype=torch.int64))


def _words(key: _Key) -> str:
    op, *leaves = key
    numbers = [leaf[1] for leaf in leaves if leaf is not torch.Tensor and len(leaf) == 2 and leaf[1] is not None]
    told = f" with {', '.join(numbers)}" if numbers else ""
    return f"{op}{told}"
