"""Opened: what a thing holds that is no plain container, by whichever protocol shows it.

Python has many places for state: weak references, per-thread attributes, buffers, objects of C that can be copied by their
`__reduce_ex__`, objects of Python's own library around dicts and queues. All are taken apart in one walk, into a flat list of
plain values, of bytes, and of things that count by which they are; two such lists tell whether anything changed. What shows
itself by no protocol (a lock, a generator's frame, an open file) is `ClosedError`: where forward reads it, it is refused by name.
"""

from __future__ import annotations

import gc
import logging
import operator
import reprlib
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.guards.attributes import (
    ANY,
    BOOKKEEPING,
    MISSING,
    SIMPLE,
    bound_to,
    draws_for_all,
    is_a,
    is_array,
    is_memory,
    is_open,
    is_pythons_own,
    is_torchs_own,
    lasts,
    own_of,
    slot_of,
    slots_of,
    variables,
)
from ariadne.guards.classes import can_become, changeable, home_of, own_dict
from ariadne.guards.kept import Kept
from ariadne.guards.readers import TOLD, answers_itself, tells
from ariadne.guards.steps import WHOLESALE, texts
from ariadne.guards.versions import VERSION, stamp

_MOST = 4096  # so many things are looked at
_WHICH = (
    torch.Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodWrapperType, ModuleType, CodeType, torch.dtype,
    torch.device,
)  # fmt: skip  # what counts by which it is: others look into these
_SPECIAL: tuple[Any, ...] = (weakref.ref, *weakref.ProxyTypes, logging.Logger, threading.local)
_OPENED = (
    "torch.optim.",
    "torch.distributions.",
)  # objects of torch's that users change, and whose attributes steer forward
_BY_METHODS = (
    "torch.optim.lr_scheduler",
    "torch.distributions.",
)  # of which torch's own methods read what no code of forward's names
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
SHOWING: tuple[type, ...] = (
    MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)  # what a dict holds
_ASKING_BY_NAME = (operator.attrgetter, operator.itemgetter, operator.methodcaller)


# attributes of a logger that tell of its level, and ways to have all of its attributes
_OF_LOGGERS = frozenset(vars(logging.getLogger("ariadne")))
_OF_LEVELS = WHOLESALE | {"dir", "disable", "disabled", "getattr_static", "level", "manager", "parent", "root"}


class ClosedError(Exception):
    """No protocol shows what a thing holds."""


def asks_by_name(value: Any) -> bool:
    """Whether calling a thing reads attributes whose names stand in no code: an `operator.attrgetter`."""
    return is_a(value, _ASKING_BY_NAME)


def counts_by_which(value: Any) -> bool:
    """Whether other guards look into a thing: a tensor, a module, a class, a function, and what torch itself made; or none need,
    as what stands in annotations.
    """
    if is_a(value, _WHICH):
        return bound_to(value) is MISSING
    kind: Any = type(value)
    home = str(kind.__module__)
    if home.startswith(_OPENED) and home_of(value) is object:
        return False
    return (home.partition(".")[0] == "typing" or is_torchs_own(home)) and not is_a(
        value, (*_CONTAINERS, *weakref.ProxyTypes)
    )


def asks_itself(value: Any) -> bool:
    """Whether methods of torch's own read attributes of an object, under names that stand in no code of forward's."""
    return str(type(value).__module__).startswith(_BY_METHODS)


def is_closed(value: Any) -> bool:
    """Whether no protocol shows what a thing holds, or something in it gives something else at each look."""
    try:
        return not alike(list(unfolded(value, None)), list(unfolded(value, None)))
    except ClosedError:
        return True


def shows_nothing(value: Any) -> bool:
    """Whether a thing of Python's own has a class of its own, and nothing in it: what it knows stands elsewhere."""
    return type(value) is not object and home_of(value) is object and not slots_of(value) and own_of(value) is None


def referent(proxy: Any) -> Any:
    """What a weak proxy stands for; `MISSING` where that is no more."""
    try:
        return proxy.__reduce_ex__.__self__  # a method that no one calls, bound to the thing itself
    except ReferenceError:
        return MISSING


def unfolded(
    value: Any, names: Collection[str] | None, assigned: Collection[str] = (), moved: Collection[int | None] = (),
    watched: Watched | None = None,
) -> Iterator[Any]:  # fmt: skip
    """A thing and all that it holds, one after another.

    Of attributes, those whose names are among `names`, if any are given. Of what forward itself changes, whose ids are among
    `moved`, no container's contents, and no attribute that its code has `assigned`. Raises
    `ClosedError` where the thing shows itself by no protocol; what is inside of it and does not counts by which it is.
    """
    todo, seen, first, told = deque([value]), set[int](), True, 0
    alive: list[Any] = []  # what is made by looking, so that no id comes twice
    while todo:
        thing = todo.popleft()
        told += 1
        if told > _MOST:
            return
        if type(thing) is _Fresh:
            alive.append(parts := list(thing.parts()))
            todo.extend(parts)
            continue
        if type(thing) is MethodType:
            todo.extend((thing.__func__, *(() if draws_for_all(thing) else (thing.__self__,))))
            continue
        if (owner := bound_to(thing)) is not MISSING:
            todo.extend((thing.__name__, owner))
            continue
        yield thing
        if lasts(thing) or type(thing) is bytes or thing is MISSING or id(thing) in seen or id(thing) in moved:
            first = False
            continue
        seen.add(id(thing))
        if counts_by_which(thing):
            first = False
            if is_a(thing, nn.Module):
                if watched is not None:
                    watched.loose = True
                plain = {n: v for n, v in vars(thing).items() if lasts(v) and n not in BOOKKEEPING and n != "training"}
                todo.extend(_named(plain, names, assigned if id(vars(thing)) in moved else ()))
            continue
        try:
            parts = list(_inside(thing, names, assigned, moved))
        except ClosedError:
            if first:
                raise
            parts = []
        first = False
        if watched is not None:
            watched.add(thing)
        if can_become(thing):
            yield type(thing)
        alive.append(parts)
        todo.extend(parts)


class Watched:
    """The dicts that all of what one look found rests on; `loose` where it rests on something else, too."""

    __slots__ = ("dicts", "kinds", "loose", "owners")

    def __init__(self) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.owners: list[tuple[Any, dict[Any, Any]]] = []  # the objects of which some are
        self.kinds: list[type] = []  # and their classes
        self.loose = VERSION is None

    def add(self, thing: Any) -> None:
        """Take note of a thing that was looked into."""
        own = own_of(thing)
        if type(thing) is dict:
            self.dicts.append(thing)
        elif home_of(thing) is object and not slots_of(thing) and type(own) is dict and not is_a(thing, _SPECIAL):
            self.dicts.append(own)
            self.owners.append((thing, own))
            self.kinds.append(type(thing))
            self.dicts.extend(own_dict(cls) for cls in changeable(type(thing)))
        elif is_memory(thing) and type(own) is dict:  # what it keeps in C are results
            self.dicts.append(own)
        elif not is_a(thing, tuple) and type(thing) is not ContextVar:  # whose value is asked for by itself
            self.loose = True

    def keeps_kinds(self, kinds: list[type]) -> bool:
        """Whether these objects are of these classes, which no dict tells of."""
        return [type(thing) for thing, _ in self.owners] == kinds

    def total(self) -> int:
        """A number that grows when one of the dicts is written."""
        return stamp(self.dicts) if VERSION is not None else -1


class _Fresh:
    """A tuple, a list or a dict that one look has made: it counts by what is in it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def parts(self) -> Iterator[Any]:
        """Its type and length, and what is in it."""
        value = self.value
        yield from (type(value).__name__, len(value))
        for one in [*value.keys(), *value.values()] if type(value) is dict else [*value]:
            yield _Fresh(one) if type(one) in (tuple, list, dict) and not lasts(one) else one


def _inside(
    thing: Any, names: Collection[str] | None, written: Collection[str], moved: Collection[int | None]
) -> Iterator[Any]:
    assigned = written if id(own_of(thing)) in moved else ()
    if is_a(thing, weakref.ProxyTypes):
        yield referent(thing)
        return
    if is_a(thing, CellType):
        yield variables(thing, ()).get("cell_contents", MISSING)
        return
    if is_a(thing, weakref.ref):
        yield weakref.ref.__call__(thing)
    elif is_a(thing, logging.Logger):  # what decides whether it writes; its cache and its handlers do not
        yield from (thing.disabled, thing.getEffectiveLevel(), getattr(thing.manager, "disable", 0))
        yield from _named(_beside(thing), names, assigned)
        return
    elif is_pythons_own(type(thing)) and own_of(thing) is None and _is_a_key(thing):
        return  # a path, a fraction: what its slots hold is the same for good, or can be found again
    elif is_a(thing, threading.local):
        yield from _named(_of_thread(thing), names, assigned)
    elif is_array(thing):
        if thing.dtype.hasobject:
            yield _Fresh([*thing.ravel().tolist()])
        else:
            yield from (str(thing.dtype), tuple(thing.shape), thing.tobytes())
    elif is_a(thing, _CONTAINERS):
        yield from _members(thing)
    elif is_a(thing, SHOWING):
        yield from gc.get_referents(thing)
        return
    else:
        yield from _of_c(thing)
    told = names is not None and TOLD in names and tells(type(thing))
    if asks_itself(thing) or (answers_itself(thing) and not told):
        names = None
    for name in slots_of(thing):
        if (names is None or name in names) and name not in assigned:
            yield from (name, slot_of(thing, name))
    yield from _named(own_of(thing) or {}, names, assigned)
    for cls in changeable(type(thing)):
        if not is_pythons_own(cls) and cls.__module__.partition(".")[0] != "numpy":
            plain = {n: v for n, v in vars(cls).items() if lasts(v) and n[:2] != "__"}
            yield from _named(plain, names, written if id(own_dict(cls)) in moved else assigned)


def _of_thread(local: threading.local) -> dict[str, Any]:
    """What it holds in this thread, past what its class makes of attributes."""
    own: dict[str, Any] = threading.local.__getattribute__(local, "__dict__")
    return own


def _named(own: dict[str, Any], names: Collection[str] | None, assigned: Collection[str]) -> Iterator[Any]:
    for name, value in [*own.items()]:
        if (names is None or name in names) and name not in assigned:
            yield from (name, value)


def _members(thing: Any) -> Iterator[Any]:
    if is_a(thing, dict):
        yield dict.__len__(thing)
        yield from [*dict.keys(thing), *dict.values(thing)]
        yield thing.default_factory if is_a(thing, defaultdict) else None
        return
    kind: Any = next(k for k in _CONTAINERS if is_a(thing, k))
    found = [*kind.__iter__(thing)]
    if kind not in (set, frozenset):
        yield from (len(found), *found)
    elif all(map(lasts, found)):
        yield frozenset(found)
    else:
        yield from (frozenset(map(id, found)), *found)


def _of_c(thing: Any) -> Iterator[Any]:
    """What lies in a thing beside its attributes, where its class is made upon one of C's."""
    home: Any = home_of(thing)
    if home is object or home in SIMPLE or is_open(home):
        return
    data = _bytes_of(thing)
    if data is not None:
        yield from data
        return
    if _equals_by_what_it_holds(home):
        return
    if is_a(thing, Iterator) and not hasattr(home, "__reduce__"):
        raise ClosedError
    try:
        found = thing.__reduce_ex__(4)
    except Exception as error:  # whatever a class says that can't be copied
        raise ClosedError from error
    if not isinstance(found, tuple):
        return  # the name of a global, which is one of its kind
    made, given, *rest = found
    kept = [list(part) if is_a(part, Iterator) else part for part in rest]
    yield made
    yield _Fresh([*given, *kept])


def _bytes_of(thing: Any) -> tuple[Any, ...] | None:
    """The format, the shape and the bytes of what lies in memory as it is; None for what does not."""
    try:
        with memoryview(thing) as data:
            return data.format, tuple(data.shape or ()), data.tobytes()
    except (TypeError, BufferError, ValueError):
        return None


def keeps_in_c(value: Any) -> bool:
    """Whether a thing may hold in C what no attribute of it shows: one of a library's extension types, or of a class upon one."""
    home: Any = home_of(value)
    if home is object or is_a(value, _CONTAINERS) or is_pythons_own(home):
        return False
    return home.__module__.partition(".")[0] not in ("torch", "numpy")  # of which others know


def _equals_by_what_it_holds(kind: Any) -> bool:
    """Whether a thing can be a key that equals another by what both hold: then that stays as it is."""
    return kind.__hash__ not in (None, object.__hash__)


def _is_a_key(thing: Any) -> bool:
    """Whether a thing of Python's own equals another by what both hold, and can stand for that in a dict."""
    try:
        hash(thing)
    except (TypeError, ValueError):  # a view of bytes that change
        return False
    return not is_a(thing, _CONTAINERS) and _equals_by_what_it_holds(type(thing))


def alike(now: list[Any], then: list[Any]) -> bool:
    """Whether two rows are the same: plain values by what they are, all others by which."""
    return len(now) == len(then) and all(
        a is b
        or (type(a) is type(b) and type(a) in (bytes, frozenset) and a == b)
        or (lasts(a) and lasts(b) and tree.identical(a, b))
        or (type(a) is type(b) is MethodWrapperType and a == b)
        for a, b in zip(now, then, strict=True)
    )


class Levels(Kept):
    """Whether a logger would write at these levels, which is all that it was asked for."""

    __slots__ = ("levels",)

    def __init__(self, thing: logging.Logger, levels: Collection[int]) -> None:
        self.levels = frozenset(levels)
        super().__init__(thing)

    def anew(self, thing: Any) -> Levels:
        """The same of another logger."""
        return Levels(thing, self.levels)

    def look(self, thing: Any) -> list[int]:
        """Those at which it would, by its own answer."""
        return sorted(level for level in self.levels if thing.isEnabledFor(level))

    def words(self, held: list[int]) -> str:
        """Those among those that were asked for."""
        asked = ", ".join(map(str, sorted(self.levels)))
        return f"a logger that of the levels {asked} writes {', '.join(map(str, held)) or 'none'}"


def asked_of(logger: Any, level: Any, known: Kept | None) -> Kept:
    """What is kept of a logger that was asked whether it writes at a level, or for its own: `level` is no number then.

    `known`: what is kept already.
    """
    if isinstance(known, State) or type(level) is not int:
        return known if isinstance(known, State) else State(logger)
    return Levels(logger, {level, *(known.levels if isinstance(known, Levels) else ())})


def only_answers(logger: Any, codes: Collection[CodeType], names: Collection[str]) -> bool:
    """Whether a thing is a logger of which these codes, and those that ask by `names`, read nothing that decides whether it writes.

    That `isEnabledFor` is called, and what it is asked, is seen.
    """
    if type(logger) is not logging.Logger:
        return False
    named = {*names}.union(*((*c.co_names, *texts(c.co_consts)) for c in codes))
    return _OF_LEVELS.isdisjoint(named) and named.isdisjoint(_beside(logger))


def _beside(logger: logging.Logger) -> dict[str, Any]:
    """What was set on a logger that is none of its own."""
    return {name: value for name, value in (own_of(logger) or {}).items() if name not in _OF_LOGGERS}


class Data(Kept):
    """The bytes in a thing, beside its attributes."""

    __slots__ = ()

    def look(self, thing: Any) -> tuple[Any, ...] | None:
        """Them, with what they mean."""
        return _bytes_of(thing)

    def words(self, held: tuple[Any, ...] | None) -> str:
        """Its type, and what there is."""
        return f"a {type(self.thing).__name__} of {', '.join(map(reprlib.repr, held or ()))}"


def data_in(value: Any) -> Data | None:
    """What is kept of a thing of a class of the user's that has more in it than attributes: bytes, as an array of `ctypes`."""
    data = None if home_of(value) is object else Data(value)
    return data if data is not None and data.held is not None else None


class State(Kept):
    """All that a thing holds, as far as forward's code has names for it."""

    __slots__ = ("assigned", "kinds", "moved", "names", "total", "watched")

    def __init__(
        self, thing: Any, names: Collection[str] | None = None, assigned: Collection[str] = (), moved: Collection[int | None] = ()
    ) -> None:  # fmt: skip
        self.names = None if names is None or ANY in names else names
        self.assigned, self.moved = assigned, moved
        self.watched, self.total = Watched(), -1
        super().__init__(thing)
        self.total, self.kinds = self.watched.total(), self.watched.kinds

    def anew(self, thing: Any) -> State:
        """The same of another thing."""
        return State(thing, self.names, self.assigned, self.moved)

    def again(self) -> State:
        """The same as it is now, without what forward's code assigns: where others than the guards' runs may have put it."""
        names = None if self.names is None else {*self.names} - {*self.assigned}
        return State(self.thing, names, self.assigned, self.moved)

    def look(self, thing: Any) -> list[Any]:
        """All of it, in a row; of a thing that shows nothing, the thing."""
        self.watched = Watched()
        try:
            return list(unfolded(thing, self.names, self.assigned, self.moved, self.watched))
        except ClosedError:
            return [thing]

    def words(self, held: list[Any]) -> str:
        """Its type, and the first plain values in it."""
        plain = [v for v in held[1:] if lasts(v) or type(v) is bytes]
        return f"a {type(self.thing).__name__} of {', '.join(map(reprlib.repr, plain[:8])) or 'other things'}"

    def is_same(self) -> bool:
        """Whether it holds the same still."""
        total = self.watched.total()
        if total == self.total and not self.watched.loose and self.watched.keeps_kinds(self.kinds):
            return True
        if not alike(self.look(self.thing), self.held):
            return False
        self.total, self.kinds = self.watched.total(), self.watched.kinds
        return True
