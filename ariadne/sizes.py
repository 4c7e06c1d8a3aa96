"""Sizes that remember where they came from, so that a forward run on real tensors shows what it asked about its batch.

While such a run is recorded, `tensor.shape` holds integers of a kind of their own wherever a size follows the batch. They
compute like any other, and note every comparison: which then can be asked again for every other batch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne.expr import Expr
from ariadne.plan import Batches
from ariadne.solve import where
from ariadne.strided import storage_of

Sources = tuple[str | None, ...]
UNKNOWN = "?"  # the source of a size that is another at each batch, in no way that is known


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

    def shape(self, t: torch.Tensor, shape: torch.Size) -> torch.Size | Shape:
        """The shape with its sizes made to remember."""
        found = self._sources(t, len(shape))
        if not any(found):
            return shape
        made = Shape(n if s is None else self._size(n, s) for n, s in zip(shape, found, strict=True))
        made.watch = self
        return made

    def _sources(self, t: torch.Tensor, dims: int) -> Sources:
        """Where a tensor's sizes come from; of one that no op made, in the memory of one with the batch, nothing is known."""
        found = self.known.get(id(t))
        if found is None and storage_of(t) in self.following:
            self.lost = True
        return found if found is not None and len(found) == dims else (None,) * dims

    def asks(self, t: torch.Tensor, shape: torch.Size, index: Sequence[Any]) -> None:
        """Ask what torch does of its own when it indexes: whether a slice reaches to the end, which it then skips.

        By indices of other kinds than torch's own, where they take several dims, nothing is known.
        """
        slices = [i for i, one in enumerate(index) if isinstance(one, slice) and one.stop is not None]
        if not slices:
            return
        sources = self._sources(t, len(shape))
        plain = all(one is None or one is Ellipsis or isinstance(one, (slice, int, torch.Tensor)) for one in index)
        for i in slices:
            one, before, after = index[i], index[:i], index[i + 1 :]
            elided = any(each is Ellipsis for each in before)
            dim = len(shape) - 1 - sum(map(_dims, after)) if elided else sum(map(_dims, before))
            if not plain or not all(n is None or isinstance(n, int) for n in (one.start, one.stop, one.step)):
                self.lost = self.lost or any(sources)
            elif (
                0 <= dim < len(shape) and (source := sources[dim]) and one.start in (None, 0) and one.step in (None, 1)
            ):
                _ = self._size(shape[dim], source) <= one.stop

    def range(self) -> Any:
        """What stands for `range`, and notes that a size went into it: it makes plain numbers of them."""
        plain, watch = range, self

        class Meta(type):
            def __instancecheck__(cls, thing: Any) -> bool:
                return isinstance(thing, plain)

        class Range(metaclass=Meta):
            def __new__(cls, *args: Any) -> Any:
                watch.lost = watch.lost or any(isinstance(a, Size) for a in args)
                return plain(*args)

        return Range

    def _size(self, value: int, source: str) -> int:
        line = _LINE.fullmatch(source)
        if line is None:  # unknown, or no multiple of the batch: what is done with it can't be followed
            self.lost = True
            return value
        offset = int(line["sign"] + line["offset"]) if line["offset"] else 0
        return Size(value, int(line["slope"] or 1), offset, line["symbol"], self)

    def losing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which notes that a size went into it."""

        def call(*args: Any) -> Any:
            if any(isinstance(a, Size) for a in args):
                self.lost = True
            return function(*args)

        return call


class Shape(tuple[int, ...]):
    """A shape whose sizes remember; `torch.Size` takes no heirs, and would compute and print with plain numbers."""

    watch: Watch

    def numel(self) -> int:
        """The product of the sizes, which remembers as they do."""
        return math.prod(self)

    def __repr__(self) -> str:
        self.watch.lost = True
        return f"torch.Size([{', '.join(map(int.__repr__, self))}])"


def _dims(index: Any) -> int:
    """How many dims of a tensor an index takes."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
        return index.dim()
    return 1


_LINE = re.compile(r"(?:(?P<slope>-?\d+)\*)?(?P<symbol>[A-Za-z_]\w*)(?: (?P<sign>[+-]) (?P<offset>\d+))?")


class Size(int):
    """An int that knows that it is `slope * batch + offset`; what leaves that form is a plain int, and noted as lost."""

    slope: int
    offset: int
    symbol: str
    watch: Watch
    __array_ufunc__ = None  # so that numpy's numbers leave the answer to it

    def __new__(cls, value: int, slope: int, offset: int, symbol: str, watch: Watch) -> Size:
        made = super().__new__(cls, value)
        made.slope, made.offset, made.symbol, made.watch = slope, offset, symbol, watch
        return made

    @property
    def source(self) -> str:
        """The expression that it is the value of."""
        return f"{self.slope}*{self.symbol} + {self.offset}"

    def _like(self, value: int, slope: int, offset: int) -> int:
        return Size(value, slope, offset, self.symbol, self.watch) if slope else value

    def __hash__(self) -> int:
        self.watch.lost = True  # a set or a dict compares by hash, where no question is seen
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return self._ask("!=", operator.ne, 0)

    def _ask(self, sign: str, function: Callable[[Any, Any], bool], other: Any) -> bool:
        answer = function(int.__index__(self), int.__index__(other) if isinstance(other, Size) else other)
        text = other.source if isinstance(other, Size) else repr(other)
        self.watch.questions[f"({self.source}) {sign} ({text})"] = answer
        return answer

    def _linear(self, other: Any, sign: int) -> int:
        """`self + sign * other`, as far as that keeps its form."""
        slope, offset = (other.slope, other.offset) if isinstance(other, Size) else (0, int(other))
        value = int.__index__(self) + sign * int.__index__(other)
        return self._like(value, self.slope + sign * slope, self.offset + sign * offset)

    def __add__(self, other: Any) -> Any:
        return self._linear(other, 1) if isinstance(other, int) else self._lose("__add__", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._linear(other, -1) if isinstance(other, int) else self._lose("__sub__", other)

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other if isinstance(other, int) else self._lose("__rsub__", other)

    def __neg__(self) -> int:
        return self._like(-int.__index__(self), -self.slope, -self.offset)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int) and not isinstance(other, Size):
            return self._like(int.__index__(self) * other, self.slope * other, self.offset * other)
        return self._lose("__mul__", other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        plain = isinstance(other, int) and not isinstance(other, Size) and other
        if plain and self.slope % other == 0 and self.offset % other == 0:
            return self._like(int.__index__(self) // other, self.slope // other, self.offset // other)
        return self._lose("__floordiv__", other)

    def __mod__(self, other: Any) -> Any:
        if isinstance(other, int) and not isinstance(other, Size) and other and self.slope % other == 0:
            return int.__index__(self) % other
        return self._lose("__mod__", other)

    def _lose(self, name: str, *others: Any) -> Any:
        self.watch.lost = True
        plain = [int.__index__(o) if isinstance(o, Size) else o for o in others]
        found = getattr(int, name)(int.__index__(self), *plain)
        if found is NotImplemented and name.strip("_") in _REFLECTED and isinstance(plain[0], float):
            return getattr(float, name)(float(int.__index__(self)), plain[0])
        return found


_REFLECTED = frozenset(
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod rdivmod".split()
)
_LOST = (
    "truediv rtruediv rfloordiv rmod pow rpow divmod rdivmod and rand or ror xor rxor lshift rlshift rshift rrshift "
    "invert abs pos round ceil floor trunc int float str repr format"
)


def _losing(name: str) -> Callable[..., Any]:
    def method(self: Size, *others: Any) -> Any:
        return self._lose(name, *others)

    return method


def _comparison(sign: str, function: Callable[[Any, Any], bool]) -> Callable[[Size, Any], Any]:
    def compare(self: Size, other: Any) -> Any:
        if isinstance(other, (int, float)):
            return self._ask(sign, function, other)
        if hasattr(other, "__float__") and not isinstance(other, torch.Tensor):
            self.watch.lost = True  # a number of another kind answers, and by whatever it makes of an int
        return NotImplemented

    return compare


for _sign, _name in (("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge")):
    setattr(Size, f"__{_name}__", _comparison(_sign, getattr(operator, _name)))
for _name in _LOST.split():
    setattr(Size, f"__{_name}__", _losing(f"__{_name}__"))
for _name in ("bit_length", "bit_count", "to_bytes", "as_integer_ratio"):
    setattr(Size, _name, _losing(_name))


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
