"""Sizes that remember where they came from, so that a forward run on real tensors shows what it asked about its batch.

While such a run is recorded, `tensor.shape` holds integers of a kind of their own wherever a size follows the batch. They
compute like any other, and note every comparison: which then can be asked again for every other batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne.expr import Expr

Sources = tuple[str | None, ...]


@dataclass
class Watch:
    """The questions that forward asked about sizes, and the sources of the sizes that it can read.

    `sources[i]` gives, for the tensors that the i-th event made, each dim as an expression in the batch or None where it is
    constant. `questions` maps a question to its answer; `lost` is set where a size went into arithmetic that can't be
    followed (division, `int()`, a float).
    """

    sources: Sequence[Sequence[Sources]]
    questions: dict[str, bool] = field(default_factory=dict)
    lost: bool = False
    known: dict[int, Sources] = field(default_factory=dict)

    def learn(self, event: int, tensors: Iterable[torch.Tensor]) -> None:
        """Tell it which tensors the event made."""
        if event < len(self.sources):
            for t, source in zip(tensors, self.sources[event], strict=False):
                self.known[id(t)] = source

    def shape(self, t: torch.Tensor, shape: torch.Size) -> torch.Size:
        """The shape with its sizes made to remember."""
        found = self.known.get(id(t))
        if found is None or len(found) != len(shape):
            return shape
        return torch.Size([n if s is None else Size(n, s, self) for n, s in zip(shape, found, strict=True)])


class Size(int):
    """An int that knows the expression it is the value of."""

    source: str
    watch: Watch

    def __new__(cls, value: int, source: str, watch: Watch) -> Size:
        made = super().__new__(cls, value)
        made.source, made.watch = source, watch
        return made

    def __hash__(self) -> int:
        self.watch.lost = True  # a set or a dict compares by hash, where no question is seen
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return self._ask("!=", operator.ne, 0)

    def __int__(self) -> int:
        self.watch.lost = True
        return int.__index__(self)

    def __float__(self) -> float:
        self.watch.lost = True
        return float(int.__index__(self))

    def _ask(self, sign: str, function: Callable[[Any, Any], bool], other: Any) -> bool:
        answer = function(int.__index__(self), int.__index__(other) if isinstance(other, Size) else other)
        if isinstance(other, (int, float)):
            self.watch.questions[f"({self.source}) {sign} ({_text(other)})"] = answer
        return answer


def _text(value: Any) -> str:
    return value.source if isinstance(value, Size) else repr(value)


def _comparison(sign: str, function: Callable[[Any, Any], bool]) -> Callable[[Size, Any], Any]:
    def compare(self: Size, other: Any) -> Any:
        return self._ask(sign, function, other) if isinstance(other, (int, float)) else NotImplemented

    return compare


def _arithmetic(sign: str, function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Size, Any], Any]:
    def compute(self: Size, other: Any) -> Any:
        if not isinstance(other, int):
            if isinstance(other, float):
                self.watch.lost = True
                mine = float(int.__index__(self))
                return function(other, mine) if swapped else function(mine, other)
            return NotImplemented
        mine, theirs = int.__index__(self), int.__index__(other)
        value = function(theirs, mine) if swapped else function(mine, theirs)
        if not isinstance(value, int):
            self.watch.lost = True
            return value
        left, right = (_text(other), self.source) if swapped else (self.source, _text(other))
        return Size(value, f"({left}) {sign} ({right})", self.watch)

    return compute


for _sign, _name in (("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge")):
    setattr(Size, f"__{_name}__", _comparison(_sign, getattr(operator, _name)))
for _sign, _name in (
    ("+", "add"),
    ("-", "sub"),
    ("*", "mul"),
    ("//", "floordiv"),
    ("%", "mod"),
    ("**", "pow"),
    ("/", "truediv"),
):
    setattr(Size, f"__{_name}__", _arithmetic(_sign, getattr(operator, _name), False))
    setattr(Size, f"__r{_name}__", _arithmetic(_sign, getattr(operator, _name), True))
setattr(Size, "__neg__", lambda self: Size(-int.__index__(self), f"-({self.source})", self.watch))  # noqa: B010 - as above


def holding(watch: Watch, symbol: str, batches: Iterable[int]) -> tuple[list[int], list[str]]:
    """The batches for which every question has the answer it had, and why the others have not."""
    kept, reasons = list(batches), []
    for question, answer in watch.questions.items():
        expr = Expr(question)
        if expr.names != {symbol}:
            continue
        holds = [b for b in kept if bool(expr.evaluate({symbol: b})) == answer]
        if len(holds) < len(kept):
            reasons.append(f"{question} is {answer}, and forward goes on from there")
            kept = holds
    return kept, reasons
