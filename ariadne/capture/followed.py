"""Followed numbers: sizes that remember how they were computed, in a forward that runs on real tensors.

To Python and to C they are `torch.SymInt`s and `torch.SymFloat`s, which torch's ops take as they are. They are no ints: whatever
wants to know the number has to ask for it, be it C (an index into a list, `struct`, numpy), text, a hash or a float on the
left. Arithmetic is followed as text, comparisons are noted as questions; where anything else asks, the run ends.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ariadne.capture.disguise import asked_by, posing

LONGEST = 2000  # characters of an expression
_PLAIN = (int, float, bool)
_NO_NUMBERS = (torch.Tensor, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, type(None))
_UNSHOWN = {math.inf: "math.inf", -math.inf: "-math.inf"}


class ReadError(BaseException):
    """A followed number was asked for in a way that can't be followed; no `except Exception` of forward's stops it."""


@dataclass
class Ledger:
    """What a run asked about followed numbers: `questions` with their answers, and how the first one was `lost`."""

    questions: dict[str, bool] = field(default_factory=dict)
    lost: str = ""
    alive: list[weakref.ref[Any]] = field(default_factory=list)

    def lose(self, how: str) -> NoReturn:
        """End the run: what forward does from here on can't be followed."""
        self.lost = self.lost or how
        raise ReadError(how)

    def ask(self, text: str, answer: bool) -> bool:
        """Note a question."""
        self.questions[text] = answer
        return answer

    def close(self) -> None:
        """Make plain numbers of all that are still alive: some may stand in caches, where other runs will find them."""
        for ref in self.alive:
            number = ref()
            if number is not None:
                _CLASS(number, Spent)


class Node:
    """What a followed number is made of; torch's C++ asks it as it asks the nodes of its own symbols."""

    def __init__(self, value: Any, text: str, ledger: Ledger) -> None:
        self.value, self.text, self.ledger = value, text, ledger

    def _made(self, value: Any, text: str) -> Node:
        if len(text) > LONGEST:
            self.ledger.lose("an expression of its batch grows without end")
        if type(value) not in _PLAIN:
            self.ledger.lose(f"a {type(value).__name__} is made of its batch")
        return Node(value, text, self.ledger)

    def binary(self, sign: str, function: Callable[[Any, Any], Any], other: Node) -> Node:
        """`self sign other`."""
        try:
            value = function(self.value, other.value)
        except ZeroDivisionError:  # at this batch, and forward may go on
            self.ledger.ask(f"({self.text if sign == '**' else other.text} == 0)", True)
            raise
        if sign in _DIVIDING and not _is_shown(other):
            self.ledger.ask(f"({other.text} == 0)", False)
        return self._made(value, f"({self.text} {sign} {other.text})")

    def call(self, name: str, function: Callable[..., Any], *others: Node) -> Node:
        """`name(self, *others)`."""
        texts = ", ".join((self.text, *(o.text for o in others)))
        return self._made(function(self.value, *(o.value for o in others)), f"{name}({texts})")

    def const(self, value: Any) -> Node:
        """A number that is the same at every batch."""
        return Node(value, shown(value), self.ledger)

    wrap_int = wrap_float = wrap_bool = const

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    is_constant = is_nested_int

    def nothing(self, *_: Any) -> None:
        """It is known to be no constant."""

    maybe_as_int = nested_int = constant_int = constant_bool = constant_float = singleton_int = nothing

    def clone(self) -> Node:
        return self

    def _graph_repr(self) -> str:
        return self.text

    def guard_bool(self, *_: Any) -> bool:
        """C++ goes on from the answer, as Python would."""
        return self.ledger.ask(self.text, bool(self.value))

    expect_true = guard_size_oblivious = guard_or_false = guard_or_true = statically_known_true = expect_size = (
        guard_bool
    )

    def guard_int(self, *_: Any) -> NoReturn:
        """C++ wants the number itself."""
        self.ledger.lose("an op of torch takes the number")

    guard_float = int_ = float_ = bool_ = guard_int


_DIVIDING = ("/", "//", "%")


def _is_shown(node: Node) -> bool:
    """Whether a node is one number for all batches."""
    return node.text == shown(node.value)


def shown(value: Any) -> str:
    """A plain number as text that gives it back."""
    if value != value:
        return "math.nan"
    return _UNSHOWN.get(value) or (f"({value!r})" if value < 0 else repr(value))


_CLASS: Callable[[Any, type], None] = object.__dict__["__class__"].__set__


def followed(node: Node) -> Any:
    """The number of a node; bools are asked for at once."""
    if type(node.value) is bool:
        return node.guard_bool()
    kind: Any = Size if type(node.value) is int else Real
    number = kind(node)
    node.ledger.alive.append(weakref.ref(number))
    return number


def plain(value: Any) -> Any:
    """The same argument of an op with plain numbers for those that are followed."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.value if isinstance(value.node, Node) else value
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {k: plain(v) for k, v in value.items()}
    return value


def own_numbers(value: Any) -> Any:
    """The same argument with our own followed numbers for those that C++ handed on."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return followed(value.node) if isinstance(value.node, Node) else value
    if type(value) in (list, tuple):
        return type(value)(map(own_numbers, value))
    return value


def following(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of `math`, which is followed."""

    def call(*args: Any) -> Any:
        first = next((a for a in args if type(a) in _FOLLOWED), None)
        if first is None:
            return function(*args)
        nodes = [node for a in args if (node := _operand(first, a)) is not None]
        if len(nodes) < len(args):
            first.node.ledger.lose(f"math.{name} takes it with what is no plain number")
        head, *rest = nodes
        return followed(head.call(f"math.{name}", function, *rest))

    return call


def _operand(number: Any, other: Any) -> Node | None:
    """The other side of an operation as a node; None where it is no number and may have its own answer."""
    if type(other) in _FOLLOWED:
        node: Node = other.node
        return node
    if type(other) in _PLAIN:
        return Node(other, shown(other), number.node.ledger)
    if not isinstance(other, _NO_NUMBERS) and any(
        hasattr(type(other), n) for n in ("__index__", "__float__", "__complex__")
    ):
        number.node.ledger.lose(f"it meets a {type(other).__name__}, which makes of it what it likes")
    return None


def _binary(sign: str, function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        node = _operand(self, other)
        if node is None:
            return NotImplemented
        left, right = (node, self.node) if reflected else (self.node, node)
        whole = sign == "**" and type(left.value) is not float and type(right.value) is not float
        if whole and (right.text != shown(right.value) or abs(right.value) > 8):
            self.node.ledger.lose("a power that grows with the batch")
        return followed(left.binary(sign, function, right))

    return method


def _comparison(sign: str, function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        node = _operand(self, other)
        return NotImplemented if node is None else followed(self.node.binary(sign, function, node))

    return method


def _unary(sign: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return followed(self.node._made(function(self.node.value), f"({sign}{self.node.text})"))

    return method


def _call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        others = tuple(o for o in others if o is not None)  # `round(n, None)` is `round(n)`
        nodes = [node for o in others if (node := _operand(self, o)) is not None]
        if len(nodes) < len(others):
            return NotImplemented
        return followed(self.node.call(name, function, *nodes))

    return method


def _losing(name: str) -> Callable[..., Any]:
    def method(self: Any, *_: Any, **__: Any) -> None:
        self.node.ledger.lose(f"the number itself is asked for by {name}")

    return method


def _hash(self: Any) -> None:
    if asked_by() == "einops":
        raise TypeError("unhashable")  # which einops takes for a symbol's, and does without its cache
    self.node.ledger.lose("a set, a dict or a cache looks it up")


def _itself(self: Any, *_: Any) -> Any:
    return self


class Size(torch.SymInt):
    """An int that is followed."""

    __class__ = posing(int)
    __array_ufunc__ = None  # so that numpy's numbers leave the answer to it


class Real(torch.SymFloat):
    """A float that is followed."""

    __class__ = posing(float)
    __array_ufunc__ = None


_FOLLOWED = (Size, Real)
_OPERATIONS = {
    "+": ("add", operator.add), "-": ("sub", operator.sub), "*": ("mul", operator.mul), "/": ("truediv", operator.truediv),
    "//": ("floordiv", operator.floordiv), "%": ("mod", operator.mod), "**": ("pow", operator.pow),
}  # fmt: skip
_COMPARISONS = {sign: (name, getattr(operator, name)) for sign, name in
                (("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge"))}  # fmt: skip
_UNARY: dict[str, tuple[str, Callable[[Any], Any]]] = {"-": ("neg", operator.neg), "+": ("pos", operator.pos)}
_CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "abs": ("abs", abs), "round": ("round", round), "ceil": ("math.ceil", math.ceil), "floor": ("math.floor", math.floor),
    "trunc": ("int", int), "sym_float": ("float", float), "sym_max": ("max", max), "sym_min": ("min", min),
}  # fmt: skip
_READS = (
    "__index__ __int__ __float__ __complex__ __str__ __repr__ __format__ __invert__ __getnewargs__ __reduce__ __reduce_ex__ "
    "__lshift__ __rlshift__ __rshift__ __rrshift__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ is_integer hex "
    "bit_length bit_count to_bytes from_bytes fromhex as_integer_ratio _sympy_"
).split()


def _equip(cls: type, of: type) -> None:
    for sign, (name, function) in _OPERATIONS.items():
        setattr(cls, f"__{name}__", _binary(sign, function, False))
        setattr(cls, f"__r{name}__", _binary(sign, function, True))
        setattr(Node, name, lambda self, other, s=sign, f=function: self.binary(s, f, other))
    for sign, (name, function) in _COMPARISONS.items():
        setattr(cls, f"__{name}__", _comparison(sign, function))
        setattr(Node, name, lambda self, other, s=sign, f=function: self.binary(s, f, other))
    for sign, (name, alone) in _UNARY.items():
        setattr(cls, f"__{name}__", _unary(sign, alone))
        setattr(Node, name, lambda self, s=sign, f=alone: self._made(f(self.value), f"({s}{self.text})"))
    for name, (text, called) in _CALLS.items():
        setattr(cls, f"__{name}__", _call(text, called))
        setattr(Node, name, lambda self, *others, t=text, f=called: self.call(t, f, *others))
    for name in _READS:
        setattr(cls, name, _losing(name))
    for name in ("conjugate", "__copy__", "__deepcopy__"):
        setattr(cls, name, _itself)
    made: Any = cls
    made.real, made.imag = property(_itself), of(0)
    if of is int:
        made.numerator, made.denominator = property(_itself), 1
    made.__bool__ = lambda self: self != 0
    made.__divmod__ = lambda self, other: (self // other, self % other)
    made.__rdivmod__ = lambda self, other: (other // self, other % self)
    made.__hash__ = _hash


_BASE: Any = torch.SymInt.__base__  # with whose heirs `__class__` may be exchanged


class Spent(_BASE):  # type: ignore[misc]
    """A followed number after its run: a plain one, to all who find it."""

    node: Node

    def __index__(self) -> int:
        return operator.index(self.node.value)

    def __int__(self) -> int:
        return int(self.node.value)

    def __float__(self) -> float:
        return float(self.node.value)

    def __bool__(self) -> bool:
        return bool(self.node.value)

    def __hash__(self) -> int:
        return hash(self.node.value)

    def __repr__(self) -> str:
        return repr(self.node.value)

    def __format__(self, spec: str) -> str:
        return format(self.node.value, spec)


def _settled(value: Any) -> Any:
    return value.node.value if type(value) is Spent else value


def _spent(name: str) -> Callable[..., Any]:
    function = getattr(operator, name.removeprefix("r") if name.startswith("r") else name)

    def method(self: Spent, *others: Any) -> Any:
        values = [self.node.value, *map(_settled, others)]
        return function(*(values[::-1] if name.startswith("r") else values))

    return method


def _finish(names: Iterable[str]) -> None:
    _equip(Size, int)
    _equip(Real, float)
    for name in names:
        setattr(Spent, f"__{name}__", _spent(name))
        if name not in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos"):
            setattr(Spent, f"__r{name}__", _spent(f"r{name}"))


setattr(Node, "str", Node._graph_repr)  # noqa: B010 - a method of that name would hide the type in the class
_finish([name for table in (_OPERATIONS, _COMPARISONS, _UNARY) for name, _ in table.values()])
