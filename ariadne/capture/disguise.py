"""Disguise: to forward's Python, a symbol of torch's is the int, float or bool that it stands for, and can't be read as text.

What asks `isinstance(x.shape[0], int)` must go the way that it goes on real tensors. Torch itself is told the truth.
"""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import GenericAlias
from typing import Any

import torch

from ariadne.capture.refusals import Patches, forget_lookups

_type = type  # while forward runs, `type` is another
SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_TOLD = frozenset({"torch", "sympy", "ariadne", "mpmath"})
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_DIVISIONS = tuple(f"__{r}{name}__" for name in ("truediv", "floordiv", "mod", "pow") for r in ("", "r"))
_OF_ANY_CLASS = frozenset({"__module__", "__qualname__", "__doc__", "__slots__", "__dict__", "__weakref__"})
_LOGS = frozenset({"logging", "warnings"})  # what they write down decides nothing


def asked_by(frames: int = 2) -> str:
    """The package of the function that calls the caller of this one."""
    name: str = sys._getframe(frames).f_globals.get("__name__", "")
    return name.partition(".")[0]


def is_told() -> bool:
    """Whether it is torch that asks, two frames up."""
    return asked_by(3) in _TOLD


def posing(of: type) -> property:
    """For `__class__` in the body of a symbol's class: what `isinstance` finds."""
    return property(lambda self: type(self) if is_told() else of)


def poses_as(kind: type) -> type:
    """What `type` says of a symbol of this kind to all but torch."""
    return next((of for symbol, of in SYMBOLS.items() if issubclass(kind, symbol)), kind)


def disguise_type(patches: Patches) -> None:
    """Let `type(symbol)` be `int`, `float` or `bool`: for `type(n) is int`, `isinstance` is not asked."""
    plain: Any = type
    kinds = set[type]()  # those known to be no symbols

    class Meta(plain):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Type:  # a metaclass that forward's code made of it
                return plain.__call__(cls, *args, **kwargs)
            found = plain(*args, **kwargs)
            if len(args) != 1 or found in kinds:
                return found
            if issubclass(found, tuple(SYMBOLS)):
                return found if asked_by() in _TOLD else poses_as(found)
            kinds.add(found)
            return found

        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, plain)

        def __subclasscheck__(cls, kind: Any) -> bool:
            return issubclass(kind, plain)

        def __eq__(cls, other: object) -> bool:
            return other is plain or other is cls

        def __hash__(cls) -> int:
            return hash(plain)

    class Type(plain, metaclass=Meta):  # type: ignore[misc]
        def __class_getitem__(
            cls, item: Any
        ) -> GenericAlias:  # `type[int]`, as modules say that torch imports meanwhile
            return GenericAlias(plain, item)

    patches.set(builtins, "type", Type)


def watch_id(mine: Callable[[], bool], patches: Patches, refuse: Callable[[str], None]) -> None:
    """Let `refuse` be told where forward asks for the `id` of a symbol: small ints are one object each, and a symbol is another."""
    plain, symbols = id, tuple(SYMBOLS)

    def found(thing: Any, /) -> int:
        if isinstance(thing, symbols) and mine() and asked_by() not in _TOLD:
            refuse("id()")
        return plain(thing)

    patches.set(builtins, "id", found)


@contextmanager
def disguised(mine: Callable[[], bool], patches: Patches, refuse: Callable[[str], None]) -> Iterator[None]:
    """While in the block, torch's symbols pose as plain numbers where it is `mine`; `refuse` is told of text made of one."""
    disguise_type(patches)
    watch_id(mine, patches, refuse)
    with ExitStack() as stack:
        for symbol, of in SYMBOLS.items():
            _refuse_text(symbol, mine, patches, refuse)
            _answer_at_once(symbol, mine, patches)
            _refuse_zero(symbol, mine, patches, refuse)
            stack.enter_context(based_on(symbol, posing_as(of, mine)))
        yield


@contextmanager
def based_on(symbol: Any, mixin: type) -> Iterator[None]:
    """While in the block, the class of a symbol has this base, or what is in it.

    Up to torch 2.13 a symbol's class has no base but `object`, and Python gives such a class no other. And it takes no `__class__`,
    which `isinstance` asks for, by `setattr`: that goes into the class's own table.
    """
    before = symbol.__bases__
    if before != (object,):
        symbol.__bases__ = (*before, mixin)
        try:
            yield
        finally:
            symbol.__bases__ = before
        return
    table: dict[str, Any] = gc.get_referents(symbol.__dict__)[0]
    lent = {name: v for name, v in vars(mixin).items() if name not in table and name not in _OF_ANY_CLASS}
    table.update(lent)
    forget_lookups(symbol)
    try:
        yield
    finally:
        for name in lent:
            del table[name]
        forget_lookups(symbol)


def posing_as(of: type, mine: Callable[[], bool]) -> type:
    """A base that brings what a plain number has and torch's symbols lack."""

    class Posing:
        __slots__ = ()
        __class__ = property(lambda self: of if mine() and not is_told() else _type(self))
        real = property(lambda self: self)
        imag = property(lambda self: of(0))
        if of is int:
            numerator = property(lambda self: self)
            denominator = property(lambda self: 1)

    for name in ("bit_count", "to_bytes"):
        if of is int:
            setattr(Posing, name, lambda self, *args, name=name, **kwargs: getattr(int(self), name)(*args, **kwargs))
    return Posing


def _refuse_zero(symbol: Any, mine: Callable[[], bool], patches: Patches, refuse: Callable[[str], None]) -> None:
    """Let `refuse` be told of a division by zero: at other batches there is none, and forward may go on from the error."""

    def dividing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *others: Any) -> Any:
            try:
                found = original(self, *others)
            except ZeroDivisionError:
                if mine():
                    refuse("a division by zero")
                raise
            divisor = self if name.startswith("__r") else others[0]
            if isinstance(divisor, symbol) and not name.endswith("pow__") and mine() and asked_by() not in _TOLD:
                bool(divisor == 0)  # a question, as any other
            return found

        return method

    for name in _DIVISIONS:
        if hasattr(symbol, name):
            patches.set(symbol, name, dividing(name, getattr(symbol, name)))


def _answer_at_once(symbol: Any, mine: Callable[[], bool], patches: Patches) -> None:
    """Let a comparison give True or False, as of plain numbers: `(n > 5) is True` asks nothing that could be followed."""

    def answering(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *others: Any) -> Any:
            found = original(self, *others)
            return bool(found) if isinstance(found, torch.SymBool) and mine() and asked_by() not in _TOLD else found

        return method

    for name in _COMPARISONS:
        if hasattr(symbol, name):
            patches.set(symbol, name, answering(name, getattr(symbol, name)))


def _refuse_text(symbol: Any, mine: Callable[[], bool], patches: Patches, refuse: Callable[[str], None]) -> None:
    shown, found = symbol.__repr__, symbol.__hash__

    def text(self: Any) -> str:
        if mine() and asked_by() not in _TOLD | _LOGS:
            refuse("text")
        told: str = shown(self)
        return told

    def key(self: Any) -> int:
        if mine() and asked_by() not in _TOLD | {"einops"}:
            refuse("a key")
        told: int = found(self)
        return told

    patches.set(symbol, "__repr__", text)
    patches.set(symbol, "__hash__", key)
