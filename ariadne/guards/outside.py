"""Outside: one thing that stands outside of a model's attributes and that forward's functions read, as it was."""

from __future__ import annotations

import os
import reprlib
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

from ariadne import tree
from ariadne.guards.attributes import (
    MISSING,
    Attribute,
    Slots,
    held,
    is_a,
    is_array,
    is_pythons_own,
    is_torchs_own,
    lasts,
)
from ariadne.guards.classes import Having, Lookup, Owned, changeable, own_dict
from ariadne.guards.contents import members_of
from ariadne.guards.functions import contents
from ariadne.guards.kept import Bytes, Contents, Kept, Length, Members
from ariadne.guards.opened import State, counts_by_which

_LARGE, _DEEP = 4096, 4  # so many entries, so deep, are looked at in a container
_CONTAINERS = (dict, list, set, frozenset, deque, tuple)
PARTS = ("__code__", "__defaults__", "__kwdefaults__")
NAMES = ("__name__", "__qualname__")  # of a class


class Variable:
    """A context variable, to be asked for its value by any key; LookupError where it has none."""

    __slots__ = ("thing",)

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.thing = variable

    def __getitem__(self, key: Any) -> Any:
        return self.thing.get()


class Itself:
    """A thing that no variable leads to, to be asked for by any key."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getitem__(self, key: Any) -> Any:
        return self.thing


class Kinds:
    """A class that tells by itself which others count as derived from it, to be asked by these."""

    __slots__ = ("thing",)

    def __init__(self, cls: type) -> None:
        self.thing = cls

    def __getitem__(self, kind: type) -> bool:
        return issubclass(kind, self.thing)


class Member:
    """A thing, to be asked by classes whether it is of them: of a protocol, which looks at what the thing holds."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getitem__(self, cls: type) -> bool:
        return isinstance(self.thing, cls)


class _OfDecimal:
    """The settings of this thread's decimal numbers, to be asked by any key."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> tuple[Any, ...]:
        c = sys.modules["decimal"].getcontext()
        return c.prec, c.rounding, c.Emin, c.Emax, c.capitals, c.clamp


_DECIMAL = _OfDecimal()


def of_decimal(names: Collection[str]) -> Iterator[Outside]:
    """The settings of decimal numbers, where code with these names may compute with such."""
    if "decimal" in sys.modules and not {"Decimal", "getcontext", "localcontext"}.isdisjoint(names):
        yield Outside(_DECIMAL, "", _DECIMAL[""], "decimal's context")


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """Something in the surroundings: `table[key]`, called `name`, was `value`, and held what was `kept` of it.

    `MISSING` stands for an attribute that was looked for in vain.
    """

    table: Any
    key: Any
    value: Any
    name: str
    owner: Any = None  # the object of the model that it was read from
    kept: Kept | None = None  # of a container, what is in it

    @property
    def is_plain(self) -> bool:
        """Whether an equal value would do as well."""
        return lasts(self.value)

    @property
    def place(self) -> tuple[int, Any, Any]:
        """The same for two that stand in one place: an attribute and an item of one object are two."""
        proxy = is_a(self.table, (Slots, Lookup, Variable, Itself, Kinds, Member))
        return id(self.table.thing if proxy else self.table), type(self.table) if proxy else None, self.key

    @property
    def dicts(self) -> list[dict[Any, Any]]:
        """The dicts of which one is written when something else comes to stand here; none where that can't be told."""
        if type(self.table) is dict:
            return [self.table]
        if self.table is os.environ and type(getattr(os.environ, "_data", None)) is dict:
            return [os.environ._data]
        return self.table.dicts if is_a(self.table, Lookup) else []

    def of_copy(self, memo: Mapping[int, Any]) -> Outside:
        """The same for a deep copy of the model; what stands outside of it is shared."""
        if id(self.owner) not in memo:
            return self
        owner = memo[id(self.owner)]
        if isinstance(self.table, Itself):
            kept = None if self.kept is None else self.kept.anew(owner)
            return replace(self, table=Itself(owner), value=owner, owner=owner, kept=kept)
        if isinstance(self.table, Member):
            return replace(self, table=Member(owner), owner=owner)
        if isinstance(self.table, Owned):
            return replace(self, table=Owned(owner, vars(owner)), owner=owner)
        return replace(self, table=Slots(owner) if isinstance(self.table, Slots) else vars(owner), owner=owner)

    def now(self) -> Any:
        """What stands there now; `MISSING` where nothing does."""
        try:
            return self.table[self.key]
        except (LookupError, TypeError, ValueError):
            return MISSING

    def stands(self) -> bool:
        """Whether this very thing, or a plain value equal to it, stands there still."""
        found = self.now()
        return found is self.value or (self.is_plain and lasts(found) and tree.identical(found, self.value))

    def is_same(self) -> bool:
        """Whether it stands there still, and holds what it held."""
        return self.stands() and (self.kept is None or self.kept.is_same())

    def told(self) -> str:
        """What it was and what it is now, in words."""
        found = self.now()
        if found is self.value and self.kept is not None:
            then, now_it_is = repr(self.kept), self.kept.now()
        else:
            then = "missing" if self.value is MISSING else reprlib.repr(self.value)
            now_it_is = "gone" if found is MISSING else reprlib.repr(found) if lasts(found) else "another"
        return f"{self.name} was {then} when a function that forward calls read it, now it is {now_it_is}"


@dataclass(slots=True)
class Opened:
    """A thing at which a chain ended, that may hold more: where it stands outside of the model, if it does, and what it is called.

    `whole`: the code may have read any attribute of it. `idle`: nothing that it holds was asked for. `state`: of a thing of
    Python's own, all that it held.
    """

    thing: Any
    name: str
    outside: Outside | None
    whole: bool
    idle: bool
    state: State | None
    unseen: str = ""  # what was asked of a thing that no protocol shows


def of_kind(
    cls: type, names: Collection[str] | None, ignored: Collection[str], which: Collection[str]
) -> Iterator[Outside]:
    """What forward may ask a class itself: which of these names it has, and what it is called."""
    if "kinds" in which:
        having = Having(cls, names, ignored)
        yield Outside(having, "", having[""], f"the names in {cls.__qualname__}")
    if "names" in which:
        for name in NAMES:
            yield Outside(Slots(cls), name, getattr(cls, name), f"{name} of {cls.__qualname__}")


def in_class(
    cls: type, names: Collection[str], assigned: Collection[str], moved: Collection[int | None]
) -> Iterator[Outside]:
    """What stands in a user's class under these names, its methods too: not what forward assigns, nor what it puts things into."""
    found = Lookup(cls)
    for base in changeable(cls):
        if not (is_pythons_own(base) or is_torchs_own(base.__module__) or base.__module__.partition(".")[0] == "numpy"):
            own = own_dict(base)
            for name in [n for n in own if n in names and n not in assigned and n[:2] != "__"]:
                if id(own[name]) not in moved:
                    table = found if found[name] is own[name] else own  # there `super()` finds it, and its own name
                    yield from with_contents(Outside(table, name, own[name], f"{base.__qualname__}.{name}"))


def kinds_in(outside: Outside) -> Iterator[type]:
    """The classes that stand in a container or an object, and those of which objects do."""
    value, things = outside.value, list[Any]()
    if isinstance(outside.kept, State):
        things = outside.kept.held
    elif is_a(value, dict):
        things = [*dict.values(value)]
    elif is_a(value, (set, frozenset)):
        things = [*(set if is_a(value, set) else frozenset).__iter__(value)]
    elif is_a(value, (list, tuple, deque)):
        things = [thing for _, thing in held(value)]
    for thing in things[:_LARGE]:
        yield thing if is_a(thing, type) else type(thing)


def add_to(found: dict[Any, Outside], one: Outside) -> None:
    """Add one to those known by their places; of one that is there without what was kept of it, that is taken over."""
    known = found.setdefault(one.place, one)
    if known.kept is None and one.kept is not None and known.value is one.value:
        found[one.place] = replace(known, kept=one.kept)


def with_contents(outside: Outside) -> Iterator[Outside]:
    """The same with what is in it, where it is a container or an array, and with the containers in that."""
    todo, seen = deque([(outside, 0)]), set[int]()
    while todo:
        one, depth = todo.popleft()
        kept = kept_of(one.value)
        yield one if kept is None else replace(one, kept=kept)
        if id(one.value) in seen or depth >= _DEEP or not _holds(one.value):
            continue
        seen.add(id(one.value))
        for step, thing in held(one.value):
            if _holds(thing) and not is_a(step, Attribute):
                todo.append((Outside(one.value, step, thing, f"{one.name}[{step!r}]", one.owner), depth + 1))


def objects_in(
    container: Outside, names: Collection[str] | None, assigned: Collection[str], moved: Collection[int | None]
) -> Iterator[Outside]:
    """What is in the objects that stand in a container, as far as forward's code has names for it."""
    value = container.value
    if id(value) in moved or not is_a(value, _CONTAINERS) or len(value) > _LARGE:
        return
    in_set = is_a(value, (set, frozenset))  # where no step leads to one
    for step, thing in enumerate(members_of(value)) if in_set else held(value):
        if lasts(thing) or counts_by_which(thing) or (not in_set and (is_a(thing, _CONTAINERS) or is_array(thing))):
            continue
        kept = State(thing, names, assigned, moved)
        table, key = (Itself(thing), "") if in_set else (value, step)
        yield Outside(table, key, thing, f"{container.name}[{step!r}]", container.owner, kept)


def _holds(value: Any) -> bool:
    """Whether something in a value may change: in a tuple, too."""
    return is_array(value) or (is_a(value, (dict, list, set, deque, tuple)) and not lasts(value))


def kept_of(value: Any) -> Kept | None:
    """What a guard keeps of what is in a container or an array."""
    if is_array(value):
        return Bytes(value)
    if not is_a(value, (dict, list, set, deque)):
        return None
    if len(value) > _LARGE:
        return Length(value)
    return Contents(value) if Contents.takes(value) else Members(value)


def of_function(function: FunctionType, began: Mapping[str, list[Any]], owned: frozenset[str]) -> Iterator[Outside]:
    """What of a function may change: its code, its defaults, and the variables that it closes over.

    `began`: what stood in these when it was called. Not those that it writes itself, which are `owned`.
    """
    name, code = function.__qualname__, function.__code__
    for part, shown in zip(PARTS, ("code", "defaults", "keyword defaults"), strict=True):
        if getattr(function, part) is None:  # a call that gives all arguments asks for no default
            continue
        yield Outside(Slots(function), part, getattr(function, part), f"the {shown} of {name}")
    yield from _defaults(function, code)
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        thing = contents(cell)
        if variable in owned or variable == "__class__" or not any(thing is was for was in began.get(variable, ())):
            continue
        yield from with_contents(
            Outside(Slots(cell), "cell_contents", thing, f"the variable {variable!r} around {name}")
        )


def of_wrapper(function: FunctionType) -> Iterator[Outside]:
    """What a function of Python's own library, such as `functools.singledispatch` makes, keeps in variables: which function for
    which type."""
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        name = f"what {function.__qualname__} keeps as {variable!r}"
        yield from with_contents(Outside(Slots(cell), "cell_contents", contents(cell), name))


def _defaults(function: FunctionType, code: CodeType) -> Iterator[Outside]:
    given: Iterable[tuple[Any, Any, str, Any]] = []
    if function.__defaults__:
        names = code.co_varnames[code.co_argcount - len(function.__defaults__) : code.co_argcount]
        given = [(function.__defaults__, i, n, function.__defaults__[i]) for i, n in enumerate(names)]
    for key, thing in (function.__kwdefaults__ or {}).items():
        given = [*given, (function.__kwdefaults__, key, key, thing)]
    for table, key, argument, thing in given:
        if table is function.__kwdefaults__ or kept_of(thing) is not None:
            yield from with_contents(
                Outside(table, key, thing, f"the default of {argument!r} of {function.__qualname__}")
            )


def is_itself(table: Any) -> bool:
    """Whether a table stands for a thing, to which no variable leads."""
    return is_a(table, Itself)


def is_class(table: Any) -> bool:
    """Whether what stands in a table stands in a class itself."""
    return is_a(table, Slots) and isinstance(table.thing, type)


def is_function(table: Any) -> bool:
    """Whether a table stands for a function's own parts."""
    return is_a(table, Slots) and type(table.thing) is FunctionType
