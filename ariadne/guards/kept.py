"""Kept: what a guard holds of things that can change by themselves."""

from __future__ import annotations

import reprlib
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.guards.attributes import is_a, is_fixed, lasts, own_of
from ariadne.guards.classes import home_of
from ariadne.guards.versions import VERSION, stamp

_SIZED = (list, dict, set, deque)


class Same:
    """Stands for one object, where a guard compares by identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __repr__(self) -> str:
        return repr(self.thing)

    def holds(self, found: Any) -> bool:
        """Whether what was found is this object."""
        return found is self.thing

    def anew(self, thing: Any) -> Same:
        """The same of another thing."""
        return Same(thing)


class Kept(ABC):
    """Something that can change by itself, with what it held at one moment."""

    __slots__ = ("held", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing, self.held = thing, self.look(thing)

    def __repr__(self) -> str:
        return self.words(self.held)

    @abstractmethod
    def look(self, thing: Any) -> Any:
        """What counts of it."""

    @abstractmethod
    def words(self, held: Any) -> str:
        """That in words."""

    def is_same(self) -> bool:
        """Whether it holds the same still."""
        return bool(self.look(self.thing) == self.held)

    def asked(self) -> bool:
        """The same, where a call asks."""
        return self.is_same()

    def asks_as(self, other: Kept) -> bool:
        """Whether another asks for the same, so that where it holds, this one does; False where nobody can tell."""
        return False

    def anew(self, thing: Any) -> Kept:
        """The same of another thing."""
        return type(self)(thing)

    def now(self) -> str:
        """What it holds now, in words."""
        return self.words(self.look(self.thing))

    def holds(self, found: Any) -> bool:
        """Whether what was found is this thing, unchanged."""
        return found is self.thing and self.is_same()


class OfKind(Kept):
    """Which class a thing is of."""

    __slots__ = ()

    def look(self, thing: Any) -> type:
        """Its class, whatever it says of that itself."""
        return type(thing)

    def words(self, held: type) -> str:
        """The name of the class."""
        return f"a {held.__qualname__}"


class Bytes(Kept):
    """A numpy array's bytes."""

    __slots__ = ()

    def look(self, thing: Any) -> tuple[Any, ...]:
        """Its type, its shape, and all bytes in it."""
        return thing.dtype, thing.shape, thing.tobytes()

    def words(self, held: tuple[Any, ...]) -> str:
        """Enough to tell two."""
        dtype, shape, data = held
        return f"an array {dtype}{list(shape)}, checksum {zlib.crc32(data):08x}"


def told_apart(names: Sequence[str], others: Sequence[str]) -> str:
    """What names have that others have not, and the other way round; where that is nothing, where their order begins to differ."""
    more, less = [n for n in names if n not in others], [n for n in others if n not in names]
    found = [f"with {', '.join(more[:8])}" if more else "", f"without {', '.join(less[:8])}" if less else ""]
    if not any(found):
        at = next((i for i, (a, b) in enumerate(zip(names, others, strict=False)) if a != b), 0)
        found = [f"with {', '.join(names[at : at + 2]) or 'no attributes'}" + (" in this order" if names else "")]
    return " and ".join(filter(None, found))


def registries_of(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """The dicts of parameters and of buffers of each module of a model, with the module's path."""
    return [(path, m.__dict__[kind]) for path, m in model.named_modules() for kind in ("_parameters", "_buffers")]


class OfTables(Kept):
    """What rests on tables, and is looked through again only after one of these was written."""

    __slots__ = ("total",)
    is_told = True  # whether the tables show each change of it; else it has to be asked at each call

    def __init__(self, thing: Any) -> None:
        self.total = -1  # of the tables, when it was looked through last
        super().__init__(thing)

    @abstractmethod
    def rests_on(self) -> Collection[dict[str, Any]]:
        """The tables, as they stand now."""

    def asked(self) -> bool:
        """Whether it is the same, for a call."""
        total = stamp(self.rests_on())
        if total == self.total and VERSION is not None:
            return True
        if not self.is_same():
            return False
        self.total = total
        return True


class Own(OfTables):
    """The names of an object's own attributes, but for those that forward's code assigns, which are `ignored`.

    With `asked`, of those names alone: forward went through no others.
    """

    __slots__ = ("asked_for", "ignored")

    def __init__(self, thing: Any, ignored: Collection[str], asked: Collection[str] | None = None) -> None:
        self.ignored = ignored
        self.asked_for = None if asked is None else sorted(set(asked).difference(ignored))
        super().__init__(thing)

    def look(self, thing: Any) -> list[str]:
        """In their order, in which forward may have gone through them."""
        own = own_of(thing) or {}
        if self.asked_for is not None:
            return [name for name in self.asked_for if name in own]
        return [name for name in own if name not in self.ignored]

    def rests_on(self) -> tuple[dict[str, Any], ...]:
        """The object's own."""
        own = own_of(self.thing)
        return () if own is None else (own,)

    def words(self, held: list[str]) -> str:
        """Those that are not alike in the two."""
        other = self.look(self.thing) if held is self.held else self.held
        return f"a {type(self.thing).__name__} {told_apart(held, other)}"

    def anew(self, thing: Any) -> Kept:
        """The same of another object."""
        return type(self)(thing, self.ignored, self.asked_for)


class Length(Kept):
    """How many things a container holds."""

    __slots__ = ()

    def look(self, thing: Any) -> int:
        """Its length, whatever its class makes of `len`."""
        kind: Any = type(thing)
        return len(thing) if kind in _SIZED else int(next(k for k in _SIZED if issubclass(kind, k)).__len__(thing))

    def words(self, held: int) -> str:
        """Its type and length."""
        return f"a {type(self.thing).__name__} of {held}"


class Versioned(Kept):
    """What stands in a container, looked at anew only where a dict's version says that it was written."""

    __slots__ = ("version",)

    def __init__(self, thing: Any) -> None:
        self.version = _version(thing)  # first: a write in between shows
        super().__init__(thing)

    def is_same(self) -> bool:
        """Whether it holds what it held."""
        version = _version(self.thing)
        if version is not None and version == self.version:
            return True
        same = self._holds(self.look(self.thing))
        if same:
            self.version = version
        return same

    def _holds(self, now: Any) -> bool:
        """Whether the same things stand there `now`, or plain values equal to them."""
        return len(now) == len(self.held) and all(map(_alike, now, self.held))


class Keys(Versioned):
    """The keys of a dict, in their order; what stands under them is held apart."""

    __slots__ = ()

    def look(self, thing: Any) -> list[Any]:
        """As Python's own class tells them."""
        return list((OrderedDict if is_a(thing, OrderedDict) else dict).__iter__(thing))

    def words(self, held: list[Any]) -> str:
        """The type, and the first keys."""
        return f"a {type(self.thing).__name__} with the keys {reprlib.repr(held)}"


class Contents(Versioned):
    """The plain values in a large container; a dict's keys count too, and their order."""

    __slots__ = ()

    @staticmethod
    def takes(thing: Any) -> bool:
        """Whether a container holds nothing but what `is_fixed`."""
        if type(thing) in (dict, OrderedDict):
            return all(map(is_fixed, thing)) and all(map(is_fixed, thing.values()))
        return type(thing) in (list, deque, set) and all(map(is_fixed, thing))

    def look(self, thing: Any) -> Any:
        """A copy one level deep; of a dict, its keys and then its values."""
        if isinstance(thing, dict):
            return [*thing, *thing.values()]
        return set(thing) if isinstance(thing, set) else list(thing)

    def words(self, held: Any) -> str:
        """The first few of them."""
        return f"a {type(self.thing).__name__} of {reprlib.repr(held)}"

    def _holds(self, now: Any) -> bool:
        """By identity, which is fast, or else by value and type."""
        if isinstance(now, set):
            return bool(now == self.held)
        return len(now) == len(self.held) and (all(map(is_, now, self.held)) or tree.identical(now, self.held))


class Members(Versioned):
    """What stands in a container, each thing by identity; a dict's keys count too, their order, and what makes missing ones."""

    __slots__ = ()

    def look(self, thing: Any) -> list[Any]:
        """A copy one level deep; of a dict, its keys and then its values."""
        if is_a(thing, dict):
            made = [thing.default_factory] if is_a(thing, defaultdict) else []
            return [*dict.keys(thing), *dict.values(thing), *made]
        kind: Any = next(k for k in (list, set, deque) if is_a(thing, k))
        found = list(kind.__iter__(thing))
        return sorted(found, key=id) if kind is set else found

    def words(self, held: list[Any]) -> str:
        """The type, and how many."""
        others = held is not self.held and len(held) == len(self.held)
        return f"a {type(self.thing).__name__} of {len(held)} {'other ' if others else ''}entries"


def _alike(a: Any, b: Any) -> bool:
    """Whether two are one thing, or plain values that do as well for each other."""
    return a is b or (lasts(a) and lasts(b) and tree.identical(a, b))


def has_grown(kept: Kept | None) -> bool:
    """Whether a dict holds what it held, and more: a registry, into which each class enters itself."""
    if not isinstance(kept, (Contents, Members)) or not is_a(kept.thing, dict):
        return False
    now, had = kept.look(kept.thing), kept.held
    more, count = (len(now) - len(had)) // 2, len(had) // 2
    return more > 0 and all(map(is_, (*now[:count], *now[count + more :][:count]), had))


class Defaults(Kept):
    """What a dict such as a `defaultdict` puts there for keys that it is asked for in vain: nothing else may stand there."""

    __slots__ = ("put",)

    def __init__(self, thing: Any, put: dict[Any, Any]) -> None:
        self.put = put
        super().__init__(thing)

    def anew(self, thing: Any) -> Defaults:
        """The same of another dict."""
        return Defaults(thing, self.put)

    def look(self, thing: Any) -> list[tuple[Any, Any]]:
        """The keys that hold something else than was put there."""
        return [
            (k, dict.get(thing, k)) for k, v in self.put.items()
            if dict.__contains__(thing, k) and not tree.identical(dict.get(thing, k), v)
        ]  # fmt: skip

    def words(self, held: Any) -> str:
        """Those, or what was put."""
        return f"a {type(self.thing).__name__} of {reprlib.repr(dict(held) or self.put)}"


def _version(thing: Any) -> int | None:
    told = (
        VERSION is not None and is_a(thing, dict) and home_of(thing) is dict
    )  # an `OrderedDict` keeps its order elsewhere
    return VERSION(thing) if told and VERSION is not None else None
