"""Surroundings: what forward's own functions read outside of the model's attributes, and the names by which they read.

A plan holds the numbers that such reads gave, so a guard has to know of them. They are found in the code of each function that
ran, as chains of attributes and constant keys (`getattr` and `hasattr` with a constant name, too) that start at a global, or at
an argument or a variable of a function around that belongs to the model, or that a global led to. Where a chain ends at a
container, all that is in it counts; where it ends at a function, an object or a tensor, which one it is. So do the methods that
ran, the code, the defaults and the closed-over variables of functions, environment and context variables, and the switches of
torch that were asked for. Not seen: a value that is reached through an import inside of a function, or a variable that is assigned
twice; what functions of torch's own and Python's own read.
"""

from __future__ import annotations

import dis
import importlib.util
import inspect
import io
import operator
import os
import random
import re
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from itertools import dropwhile, takewhile
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.guards import switches
from ariadne.guards.attributes import (
    ANY,
    BOOKKEEPING,
    MISSING,
    PYTHONS_FILES,
    Slots,
    held,
    is_a,
    is_array,
    is_pythons,
    is_pythons_own,
    lasts,
    own_of,
)
from ariadne.guards.classes import Lookup, changeable, own_dict
from ariadne.guards.functions import made_inside, reached
from ariadne.guards.kept import Defaults
from ariadne.guards.opened import State, asks_by_name, counts_by_which, home_of, is_closed, shows_nothing
from ariadne.guards.outside import Itself, Outside, Variable, of_decimal, of_function, of_wrapper, with_contents

_CONTAINERS = (dict, list, set, frozenset, deque, tuple)
_LARGE = 4096  # so many entries of a container are looked into
_SILENT = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL")
_WHOLESALE = frozenset(
    "__dict__ __getstate__ __reduce_ex__ asdict astuple attrgetter format getmembers model_dump repr vars".split()
)
_PUTTING = frozenset({"setdefault", "update"})
_PACKAGES = {"torch", "ariadne", "sympy", "numpy", "builtins"}
_CALLING = ("torch.nn.", "torch.functional")  # whose Python calls what users replace: `F.gelu`
_IDENTITY = (operator.is_, operator.is_not)
_NOT_CALLING = "torch.nn.modules.module"
_CHANGES = frozenset(
    "add append appendleft clear discard extend insert move_to_end pop popitem popleft remove reverse setdefault sort "
    "update".split()
)
_ENTERING = ("BEFORE_WITH", "BEFORE_ASYNC_WITH")
_KEYS = ("LOAD_GLOBAL", "LOAD VARIABLE", "CONSTANT", "ATTRIBUTE", "SUBSCRIPT")
_ENVIRONMENT: CodeType | None = getattr(getattr(type(os.environ), "__getitem__", None), "__code__", None)

_IMPORT_MODULE: CodeType = importlib.import_module.__code__

Step = tuple[str, Any]
_ASKING: tuple[Step, ...] = (("LOAD_GLOBAL", "getattr"), ("LOAD_GLOBAL", "hasattr"))


@dataclass(frozen=True, slots=True)
class Chain:
    """A read in a function's code: from a global or an argument of this name, by these links.

    A link is (kind, key): an attribute by its name, an item by its key, or an attribute that is asked for by `getattr`.
    """

    start: str
    links: tuple[tuple[str, Any], ...] = ()
    of_argument: bool = False
    entered: bool = False  # by a `with`, and nothing else
    imported: bool = False  # from the module of this name, by an import inside of the function


class Dropped(str):
    """The name of a method whose result is dropped where it is called: `log.info(...)` alone in a line."""

    __slots__ = ()


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


@dataclass
class Surroundings:
    """What the functions that ran have read, as it was when each ran first.

    `belongs` tells the objects that the model holds. `names`: all names and texts in the code of these functions; an attribute of
    an object that goes by none of them was not read, unless `ANY` is among them, or the object among those read as a `whole`.
    `switches`: the settings of torch that were asked for.
    """

    belongs: Callable[[Any], bool]
    found: dict[tuple[int, Any, Any], Outside] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    whole: dict[int, Any] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)  # attributes that the code assigns
    filled: set[str] = field(default_factory=set)  # attributes that it reads where it puts something into a container
    quiet: set[int] = field(default_factory=set)  # codes that read nothing that counts
    drew: bool = False  # this thread drew from Python's own generator
    switches: set[str] = field(default_factory=set)
    codes: set[CodeType] = field(default_factory=set)  # of functions of the user's
    compared: str = ""  # one that compares things by identity in C
    _reads: dict[int, _Code] = field(default_factory=dict)
    _seen: set[tuple[int, ...]] = field(default_factory=set)  # two modules may hold equal code
    _others: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    _outer: dict[int, tuple[Any, str]] = field(default_factory=dict)  # objects outside of the model, and their names
    _opened: dict[int, Opened] = field(default_factory=dict)
    _models: dict[int, Any] = field(
        default_factory=dict
    )  # things that the model holds, and that functions may be given
    _roots: list[Any] = field(default_factory=list)  # further things that lead to functions
    _later: list[tuple[Chain, dict[str, Any], _Code]] = field(
        default_factory=list
    )  # what they import was not there yet
    _made: set[int] = field(default_factory=set)  # codes of functions that forward makes as it runs
    _began: dict[int, dict[str, list[Any]]] = field(default_factory=dict)  # what closed-over variables held, by code

    def note(self, frame: FrameType) -> None:
        """Look at the code of a call; of torch's or Python's own, only at the names in it, and at the functions it calls."""
        code, table = frame.f_code, frame.f_globals
        if code is _IMPORT_MODULE and is_a(imported := frame.f_locals.get("name"), str):
            self._later.append((Chain(imported, imported=True), table, _NO_CODE))
        if id(table) not in self._others:
            self._others[id(table)] = is_known(table), table
        others = self._others[id(table)][0]
        if id(code) not in self._reads:
            if str(table.get("__name__")).partition(".")[0] not in ("ariadne", "torch"):
                self.names.update(code.co_names, _texts(code.co_consts))
            self._reads[id(code)] = _Code.of(code, others, str(table.get("__name__")))
            if not others:
                self.codes.add(code)
                self._made.update(made_inside(code))
                steps = list(plain_steps(marked(dis.get_instructions(code))))
                self.assigned.update(name for kind, name in steps if kind == "STORE_ATTR")
                if any(kind == "STORE_SUBSCR" for kind, _ in steps) or not _PUTTING.isdisjoint(code.co_names):
                    self.filled.update(name for kind, name in steps if kind == "ATTRIBUTE")
        read = self._reads[id(code)]
        if others and self._of_torch(frame):
            return
        variables = code.co_freevars if not others and id(code) not in self._made else ()
        methods = bool(code.co_argcount) and (not others or read.chains)
        if not (
            read.chains or read.wholesale or variables or methods or read.every_global
        ):  # nearly all of torch's code
            self.quiet.add(id(code))
            return
        given = frame.f_locals if variables or methods or _given(code) else {}
        for name in variables:
            if name in given and name not in read.owned:
                held_before = self._began.setdefault(id(code), {}).setdefault(name, [])
                if not any(given[name] is thing for thing in held_before):
                    held_before.append(given[name])
                self._enter(given[name], f"the variable {name!r} around {code.co_name}")
        for name in _given(code):
            if is_a(given.get(name), type) and not counts_as_torchs(given[name]):
                self._enter(given[name], given[name].__qualname__)
        mine = {name: given[name] for name in _given(code) if name in given and self.belongs(given[name])}
        outer = {name: given[name] for name in _given(code) if name in given and id(given[name]) in self._outer}
        kind = _kind(given.get(code.co_varnames[0])) if methods else None
        at = (id(code), id(table), id(kind), *map(id, mine.values()), *map(id, outer.values()))
        if at in self._seen:
            return
        self._seen.add(at)
        for outside in _method(kind, code) if kind is not None else ():
            self.found.setdefault(outside.place, outside)
            if is_a(outside.value, FunctionType):
                self._enter_defaults(outside.value)
        for thing in mine.values() if read.wholesale else ():
            if is_a(thing, nn.Module):  # or something that it holds
                if not others:
                    self.names.add(ANY)
            else:
                self.whole[id(thing)] = thing
        for name, value in [*table.items()] if read.every_global else ():
            if lasts(value) and name not in read.owned and name[:2] != "__":
                found = Outside(table, name, value, f"the global {table.get('__name__')}.{name}")
                self.found.setdefault(found.place, found)
        for chain in read.chains:
            for outside in self._read(chain, table, mine, outer, read, others):
                self.found.setdefault(outside.place, outside)

    def ask(self, function: Any, frame: FrameType) -> None:
        """Look at a call of a function of C's."""
        name = switches.asked(function)
        if name is not None:
            if not switches.is_torchs_business(frame.f_globals.get("__name__")):
                self.switches.add(name)
        elif function in _IDENTITY:
            if not is_known(frame.f_globals):
                self.compared = frame.f_code.co_name
        elif function.__name__ == "get" and type(function.__self__) is ContextVar:
            variable = function.__self__
            outside = Outside(Variable(variable), "", MISSING, f"the context variable {variable.name!r}")
            outside = replace(outside, value=outside.now())
            self.found.setdefault(outside.place, outside)
            if outside.value is not MISSING and not lasts(outside.value):
                self._enter(outside.value, outside.name)
                self._open(outside.value, outside.name, outside, False, False, ())

    def _of_torch(self, frame: FrameType) -> bool:
        """Whether a function of torch's or Python's own tells a switch, or a variable of the environment, which then counts."""
        switch = switches.asked_by(frame.f_code)
        if switch is None and frame.f_code is not _ENVIRONMENT:
            return False
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
            caller = caller.f_back
        if caller is None or switches.is_torchs_business(caller.f_globals.get("__name__")):
            return True
        if switch is not None:
            self.switches.add(switch)
        elif frame.f_locals.get("self") is os.environ and isinstance(key := frame.f_locals.get("key"), str):
            found = Outside(os.environ, key, MISSING, f"the environment variable {key!r}")
            self.found.setdefault(found.place, replace(found, value=found.now()))
        return True

    def _read(
        self,
        chain: Chain,
        table: dict[str, Any],
        mine: Mapping[str, Any],
        outer: Mapping[str, Any],
        read: _Code,
        others: bool,
    ) -> Iterator[Outside]:
        """What a chain passes on its way to a value that counts, as far as no other guard looks at it."""
        way: list[Outside] = []
        foreign = not chain.of_argument
        if chain.of_argument:
            if chain.start in mine:
                value = mine[chain.start]
                name = type(value).__name__
            elif chain.start in outer:
                value = outer[chain.start]
                foreign, name = id(value) not in self._models, self._outer[id(value)][1]
            else:
                return
        elif chain.imported:
            value, name = sys.modules.get(_absolute(chain.start, table), MISSING), chain.start.lstrip(".")
            if value is MISSING:
                self._later.append((chain, table, read))
                return
        else:
            if chain.start not in table:
                return
            value, name = table[chain.start], f"the global {table.get('__name__')}.{chain.start}"
            way.append(Outside(table, chain.start, value, name))
        rest = deque(chain.links)
        if value is sys and [kind for kind, _ in chain.links[:2]] == ["attribute", "item"] and rest[0][1] == "modules":
            value, name, way = sys.modules.get(rest[1][1], MISSING), f"the module {rest[1][1]}", []
            rest = deque(chain.links[2:])
        while rest:
            kind, key = rest[0]
            if lasts(value):
                break
            link = _link(value, kind, key, name)
            if link is None:
                self._enter(_descriptor(value, kind, key), f"{type(value).__qualname__}.{key}")
                if kind != "item" and is_a(there := inspect.getattr_static(value, key, None), singledispatchmethod):
                    self._roots.append(there)
                break
            rest.popleft()
            # What an object of the model has itself, or a module from its class, is held already as the attribute that was read.
            if foreign:
                way.append(link)
            elif not (is_a(value, nn.Module) or _has_itself(value, key)):
                way.append(replace(link, owner=value))
            value, name = link.value, link.name
            if kind == "asked":
                break
        if others:
            if callable(value) and not is_a(value, (type, nn.Module)):
                yield from way
            return
        if lasts(value) or value is MISSING:
            yield from way
            return
        outside = None
        if foreign and not self.belongs(value):
            outside = way[-1] if way else Outside(Itself(value), "", value, name)
        elif not foreign and not counts_by_which(value):
            self._models.setdefault(id(value), value)
            self._enter(value, name)
        if is_a(value, FunctionType):
            self._enter_defaults(value)
        if outside is not None and not is_a(value, ModuleType):
            yield from way[:-1]
            yield from [outside] if chain.start in read.owned else with_contents(outside)
            self._enter(value, name)
        idle = chain.entered if not rest else len(rest) == 1 and is_a(rest[0][1], Dropped)
        self._open(value, name, outside, read.wholesale, idle, rest)

    def _enter_defaults(self, function: FunctionType) -> None:
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._enter(value, f"a default argument of {function.__qualname__}")

    def _enter(self, value: Any, name: str) -> None:
        """Take note of an object outside of the model, which methods and functions that are called with it may look into."""
        if value is MISSING or self.belongs(value) or lasts(value) or is_a(value, _CONTAINERS):
            return
        if is_a(value, type) or not counts_by_which(value):
            self._outer.setdefault(id(value), (value, name))

    def _open(
        self, value: Any, name: str, outside: Outside | None, whole: bool, idle: bool, rest: Sequence[tuple[str, Any]]
    ) -> None:
        """Take note of a thing that may hold more than chains tell, and of one that tells nothing though it was asked."""
        whole_kinds = (type, ModuleType, nn.Module)
        theirs = outside is not None and is_a(value, whole_kinds) and (is_a(value, nn.Module) or not _is_torchs(value))
        if counts_by_which(value) and not theirs:
            return
        if type(value).__module__ == "decimal":
            self.names.add("Decimal")
        if asks_by_name(value):
            self.names.update(part for text in _texts(value.__reduce__()[1]) for part in text.split("."))
        known = self._opened.get(id(value))
        if known is None:
            looked = not (theirs or is_a(value, _CONTAINERS) or is_array(value)) and (
                is_pythons_own(type(value)) or home_of(value) is not object
            )
            state = State(value) if looked else None
            known = self._opened[id(value)] = Opened(value, name, outside, whole, idle, state)
        known.outside, known.whole, known.idle = known.outside or outside, known.whole or whole, known.idle and idle
        if rest and is_pythons_own(type(value)) and shows_nothing(value):
            known.unseen = known.unseen or f"{name}, a {type(value).__name__}"
        if not idle and not known.unseen and home_of(value) is not object:
            moves = is_a(value, Iterator) and not is_a(value, (io.IOBase, *weakref.ProxyTypes))
            if moves or (rest and is_closed(value)):
                known.unseen = f"{name}, {'an iterator' if moves else f'a {type(value).__name__}'}"

    @property
    def unseen(self) -> str:
        """A thing that was asked for what no guard can see, in words; empty where there is none."""
        return next((one.unseen for one in self._opened.values() if one.unseen), "")

    def moving(self) -> list[tuple[str, State]]:
        """The things of Python's own that hold something else now, as they are now: what changes once more is no cache."""
        moved = (one for one in self._opened.values() if one.state is not None and not one.state.is_same())
        return [(one.name, State(one.thing)) for one in moved]

    def _opened_outside(self, moved: Collection[int], defaults: Mapping[int, dict[Any, Any]]) -> Iterator[Outside]:
        """What is in the things at which chains ended, as far as code that ran has names for it."""
        for one in self._opened.values():
            if one.outside is None or one.idle:
                continue
            names = None if one.whole else self.names
            if id(one.thing) in defaults:
                yield replace(one.outside, kept=Defaults(one.thing, defaults[id(one.thing)]))
            elif is_a(one.thing, (ModuleType, nn.Module)):
                own = vars(one.thing)
                for name in self.names.intersection(own) - BOOKKEEPING - self.assigned:
                    if lasts(own[name]) and name[:2] != "__":
                        yield Outside(own, name, own[name], f"{one.name}.{name}")
            elif is_a(one.thing, type):
                kind = Lookup(one.thing)
                for name in self.names.intersection(*[{n for d in kind.dicts for n in d}]) - self.assigned:
                    if lasts(value := kind[name]):
                        yield Outside(kind, name, value, f"{one.thing.__qualname__}.{name}")
            elif not is_a(one.thing, _CONTAINERS) and not (is_array(one.thing) and not one.thing.dtype.hasobject):
                yield replace(one.outside, kept=State(one.thing, names, self.assigned, moved))
            else:
                for inner in with_contents(one.outside):
                    yield from self._inside(inner, names, moved)

    def _inside(self, container: Outside, names: Collection[str] | None, moved: Collection[int]) -> Iterator[Outside]:
        """What is in the objects that stand in a container."""
        if id(container.value) in moved or not is_a(container.value, _CONTAINERS) or len(container.value) > _LARGE:
            return
        for step, thing in held(container.value):
            if not (lasts(thing) or counts_by_which(thing) or is_a(thing, _CONTAINERS) or is_array(thing)):
                kept = State(thing, names, self.assigned, moved)
                yield Outside(container.value, step, thing, f"{container.name}[{step!r}]", container.owner, kept)

    def lasting(
        self, roots: Iterable[Any] = (), moved: Collection[int] = (),
        defaults: Mapping[int, dict[Any, Any]] = types.MappingProxyType({}),
    ) -> list[Outside]:  # fmt: skip
        """What was read and is still as it was: what forward itself changes tells nothing about the next call.

        With what may change of the functions that ran, among those that it leads to, or `roots` do; without the containers of
        which the ids are among `moved`; `defaults`: by a dict's id, what it put there where it was asked in vain.
        """
        found = dict(self.found)
        for outside in of_decimal(self.names):
            found[outside.place] = outside
        later, self._later = self._later, []
        for chain, table, read in later:
            name = _absolute(chain.start, table)
            if not chain.links and is_a(module := sys.modules.get(name), ModuleType):
                self._open(module, f"the module {name}", Outside(sys.modules, name, module, name), False, False, ())
            for outside in self._read(chain, table, {}, {}, read, False):
                found.setdefault(outside.place, outside)
        for function in reached([*(o.value for o in self.found.values()), *roots, *self._roots]):
            read = self._reads.get(id(function.__code__))
            if read is None or id(function.__code__) in self._made:
                continue
            if not read.of_others:
                for outside in of_function(function, self._began.get(id(function.__code__), {}), read.owned):
                    if id(outside.value) in defaults:
                        outside = replace(outside, kept=Defaults(outside.value, defaults[id(outside.value)]))
                    found.setdefault(outside.place, outside)
                    for inner in self._inside(outside, self.names, moved):
                        found.setdefault(inner.place, inner)
            elif function.__closure__ and function.__code__.co_filename.startswith(PYTHONS_FILES):
                for outside in of_wrapper(function):
                    found.setdefault(outside.place, outside)
        for outside in self._opened_outside(moved, defaults):
            found[outside.place] = outside
        return [outside for outside in found.values() if outside.is_same()]


@dataclass(frozen=True, slots=True)
class _Code:
    """A function's code: the reads in it, whether it may read attributes by any name, and the names that it `owned`.

    Those are what it assigns to, or changes the contents of, itself: a counter, a cache.
    """

    code: CodeType  # kept, so that its id stays its own
    chains: tuple[Chain, ...]
    wholesale: bool
    owned: frozenset[str]
    of_others: bool
    every_global: bool = False  # it asks `globals()` for a name that it makes

    @classmethod
    def of(cls, code: CodeType, others: bool, module: str) -> _Code:
        calling = others and module.startswith(_CALLING) and module != _NOT_CALLING
        steps = list(plain_steps(marked(dis.get_instructions(code)))) if calling or not others else []
        steps = [("CONSTANT", module) if step == ("LOAD_GLOBAL", "__name__") else step for step in steps]
        if calling:
            return cls(code, tuple(c for c in chains((), steps) if not c.of_argument), False, frozenset(), True)
        found = [*chains(_given(code), steps)]
        by_name = "globals" in code.co_names
        if by_name:
            found += [Chain(text) for text in _texts(code.co_consts)]
        wholesale = not _WHOLESALE.isdisjoint(code.co_names) or makes_names(steps)
        every = by_name and _asks_for_any_global(steps)
        return cls(code, tuple(found), wholesale, frozenset(owned_by(steps)), others, every)


_NO_CODE = _Code(_IMPORT_MODULE, (), False, frozenset(), True)


def _asks_for_any_global(steps: Sequence[Step]) -> bool:
    """Whether what `globals()` gives is asked for a name that stands in no code."""
    for i, step in enumerate(steps):
        if step == ("LOAD_GLOBAL", "globals"):
            after = [s for s in steps[i + 1 : i + 7] if not s[0].startswith(("CALL", "ATTRIBUTE", "PUSH"))]
            if not after or after[0][0] != "CONSTANT" or _makes_text(steps[i + 1 : i + 7]):
                return True
    return False


def _makes_text(steps: Iterable[Step]) -> bool:
    """Whether something is put together in these steps."""
    return any(s[0].startswith(("BINARY", "BUILD_STRING", "FORMAT")) for s in steps)


def owned_by(steps: Sequence[Step]) -> Iterator[str]:
    """The globals and variables that a function assigns to, or the contents of which it changes."""
    for i, (kind, name) in enumerate(steps):
        if kind in ("STORE_GLOBAL", "STORE VARIABLE", "DELETE VARIABLE", "DELETE_GLOBAL"):
            yield name
        elif kind in ("LOAD_GLOBAL", "LOAD VARIABLE"):
            after = list(takewhile(lambda s: s[0] in _KEYS, steps[i + 1 : i + 8]))
            end = steps[i + 1 + len(after) : i + 2 + len(after)]
            if end and end[0][0] in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                yield name
            if after and after[0][0] == "ATTRIBUTE" and after[0][1] in _CHANGES:
                yield name


def _kind(first: Any) -> type | None:
    """The class whose methods a function may be one of, by its first argument."""
    kind = first if is_a(first, type) else type(first)
    return kind if next(changeable(kind), None) is not None else None


def _method(kind: type, code: CodeType) -> Iterator[Outside]:
    """Where in a class the function with this code stands, and that nothing comes before it."""
    name = code.co_name
    for cls in changeable(kind):
        thing = vars(cls).get(name, MISSING)
        if thing is not MISSING and any(f.__code__ is code for f in reached([thing])):
            yield Outside(own_dict(cls), name, thing, f"{cls.__qualname__}.{name}")
            if (lookup := Lookup(kind))[name] is thing:
                yield Outside(lookup, name, thing, f"{kind.__qualname__}.{name}")
            return


@contextmanager
def surroundings(
    mine: Callable[[], bool], belongs: Callable[[Any], bool], aside: Callable[[], AbstractContextManager[None]]
) -> Iterator[Surroundings]:
    """Look at every Python function that starts in the block, in this thread, while what runs is `mine`.

    To look is done `aside`. A profiler that is at work meanwhile sees nothing of the block.
    """
    found, before = Surroundings(belongs), sys.getprofile()
    quiet, shared = found.quiet, random.seed.__self__  # type: ignore[attr-defined]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in quiet and mine():
                with aside():
                    found.note(frame)
        elif event == "c_call":
            if getattr(argument, "__self__", None) is shared:
                found.drew = True
            if mine():
                with aside():
                    found.ask(argument, frame)

    sys.setprofile(profile)
    try:
        yield found
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # one in C, such as cProfile's: only it can put itself back
            sys.setprofile(None)
            getattr(before, "enable", lambda: None)()


def is_known(table: Mapping[str, Any]) -> bool:
    """Whether a module's globals are those of torch or of Python itself, by name and, where names are common, by place."""
    name = str(table.get("__name__"))
    top = name.partition(".")[0]
    if top in _PACKAGES:
        return True
    if top not in sys.stdlib_module_names:
        return False
    module = sys.modules.get(name)
    return is_pythons(module) if module is not None and vars(module) is table else "__file__" not in table


def _given(code: CodeType) -> tuple[str, ...]:
    """The variables that a function starts with: its arguments, and those of the functions around it."""
    return (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars)


def _texts(constants: Any) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def makes_names(steps: Sequence[Step]) -> bool:
    """Whether a function may read attributes by names that do not stand in its code: `getattr(x, name)`, or `case Point(0)`."""
    for i, step in enumerate(steps):
        if step[0] == "MATCH_CLASS" and step[1]:
            return True
        if step in _ASKING:
            rest = list(takewhile(lambda s: not s[0].startswith("CALL"), steps[i + 1 :]))
            if not rest or rest[0][0] not in ("LOAD VARIABLE", "LOAD_GLOBAL"):
                return True
            rest = list(dropwhile(lambda s: s[0] == "ATTRIBUTE", rest[1:]))
            if not rest or rest[0][0] != "CONSTANT" or not isinstance(rest[0][1], str):
                return True
            if any(s[0].startswith(("BINARY", "BUILD", "FORMAT")) for s in rest):
                return True
    return False


def marked(steps: Iterable[dis.Instruction]) -> list[dis.Instruction]:
    """The steps, with the names of methods marked whose results are dropped right after their calls."""
    found = [s for s in steps if s.opname not in ("CACHE", "EXTENDED_ARG")]
    for i, step in enumerate(found):
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR") and _is_dropped(found, i):
            found[i] = step._replace(argval=Dropped(step.argval))
    return found


def _is_dropped(steps: Sequence[dis.Instruction], at: int) -> bool:
    depth, i = 0, at
    for _ in range(256):
        if i + 1 >= len(steps) or depth < 0:
            return False
        depth += dis.stack_effect(steps[i].opcode, steps[i].arg, jump=False)
        called = i > at and steps[i].opname.startswith("CALL")
        if depth == 0:  # an attribute that is called is two things on the stack
            return called and steps[i + 1].opname == "POP_TOP"
        i += 1
        if steps[i - 1].opname == "JUMP_FORWARD":  # past the other side of a choice
            i = next((k for k in range(i, len(steps)) if steps[k].offset >= steps[i - 1].argval), len(steps))
    return False


def plain_steps(steps: Iterable[dis.Instruction]) -> Iterator[Step]:
    """The steps as (kind, argument), the same for every Python: later ones load or store two variables in one step."""
    for step in steps:
        kinds = re.findall(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF)", step.opname)
        if kinds:
            arguments = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            yield from zip((f"{kind} VARIABLE" for kind in kinds), arguments, strict=False)
        elif step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]"):
            yield "SUBSCRIPT", None
        elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            yield "CONSTANT", step.argval
        elif step.opname == "LOAD_NAME":  # in what `eval` runs
            yield "LOAD_GLOBAL", step.argval
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield "ATTRIBUTE", step.argval
        elif step.opname not in _SILENT:
            yield step.opname, step.argval


def chains(arguments: Sequence[str], steps: Sequence[Step]) -> Iterator[Chain]:
    """The reads in a function's code, each from where it starts to where something else happens to the value."""
    counted = {name for kind, name in steps if kind == "STORE_GLOBAL"}  # its own, such as a counter or "was told once"
    stored = Counter(name for kind, name in steps if kind in ("STORE VARIABLE", "DELETE VARIABLE"))
    variables = {name: Chain(name, (), True) for name in arguments if not stored[name]}
    for i, (kind, name) in enumerate(steps):
        if kind == "IMPORT_NAME":
            for variable, chain in _imported(steps, i):
                if stored[variable] == 1:
                    variables[variable] = chain
                yield chain
            continue
        if kind == "LOAD_GLOBAL" and name not in counted:
            start = Chain(name)
        elif kind == "LOAD VARIABLE" and name in variables:
            start = variables[name]
        else:
            continue
        links, at = _links(steps, i + 1, i > 0 and steps[i - 1] in _ASKING)
        entered = at < len(steps) and steps[at][0] in _ENTERING
        chain = replace(start, links=start.links + links, entered=entered)
        if at < len(steps) and steps[at][0] == "STORE VARIABLE" and stored[steps[at][1]] == 1:
            variables[steps[at][1]] = chain
        if not chain.imported or chain.links:
            yield chain


def _imported(steps: Sequence[Step], at: int) -> Iterator[tuple[str, Chain]]:
    """The variables that an import inside of a function sets, and what they stand for."""
    level = steps[at - 2][1] if at > 1 and steps[at - 2][0] == "CONSTANT" else 0
    name = "." * (level if isinstance(level, int) else 0) + str(steps[at][1])
    after = steps[at + 1 : at + 64]
    if after and after[0][0] == "STORE VARIABLE":
        yield after[0][1], Chain(name.partition(".")[0], imported=True)
        return
    for (kind, part), *rest in zip(after, after[1:], after[2:], after[3:], strict=False):
        if kind == "IMPORT_FROM":
            variable = next((s[1] for s in rest if s[0] == "STORE VARIABLE"), None)
            if variable is not None:
                renamed = rest[0][0] != "STORE VARIABLE" and name.endswith(f".{part}")  # `import a.b as c`
                links = () if renamed else (("attribute", part),)
                yield variable, Chain(name, links, imported=True)
        elif kind not in ("STORE VARIABLE", "SWAP", "POP_TOP"):
            return


def _absolute(name: str, table: Mapping[str, Any]) -> str:
    """The name of a module as `sys.modules` has it, from the place of the import."""
    try:
        return importlib.util.resolve_name(name, str(table.get("__package__") or table.get("__name__")))
    except ImportError:
        return name


def _links(steps: Sequence[Step], at: int, asks: bool) -> tuple[tuple[tuple[str, Any], ...], int]:
    """The links that start at a step, and where they end."""
    found: list[tuple[str, Any]] = []
    while at < len(steps):
        kind, key = steps[at]
        if kind == "ATTRIBUTE":
            found.append(("attribute", key))
        elif kind == "CONSTANT" and asks and isinstance(key, str):
            if _makes_text(takewhile(lambda s: not s[0].startswith("CALL"), steps[at:])):
                break
            return (*found, ("asked", key)), at + 1
        elif kind == "CONSTANT" and steps[at + 1 : at + 2] == [("SUBSCRIPT", None)]:
            found.append(("item", key))
            at += 1
        else:
            break
        at += 1
    return tuple(found), at


def _link(value: Any, kind: str, key: Any, name: str) -> Outside | None:
    """What one link of a chain leads to; None where that can't be told without running the model's code."""
    if kind == "item":
        # To ask a defaultdict would put something there.
        if not is_a(value, (dict, list, tuple)) or (is_a(value, dict) and key not in value):
            return None
        found = Outside(value, key, MISSING, "").now()
        return None if found is MISSING else Outside(value, key, found, f"{name}[{key!r}]")
    if is_a(value, torch.Tensor):
        own = own_of(value)
        if own is None or hasattr(torch.Tensor, key):
            return None
        return Outside(own, key, own.get(key, MISSING), f"{name}.{key}")
    if _is_torchs(value):
        there = (
            vars(value).get(key, MISSING) if is_a(value, ModuleType) and _home(value).startswith("torch") else MISSING
        )
        return Outside(vars(value), key, there, f"{name}.{key}") if callable(there) or is_a(there, ModuleType) else None
    there = inspect.getattr_static(value, key, MISSING)
    if there is MISSING and is_a(value, dict) and key in value and getattr(value, key, MISSING) is value[key]:
        return Outside(value, key, value[key], f"{name}.{key}")  # a dict whose keys can be read as attributes
    if is_a(there, MemberDescriptorType):
        there = getattr(value, key, MISSING)
    table = vars(value) if is_a(value, ModuleType) else Slots(value)
    if there is MISSING:
        finds_more = hasattr(type(value), "__getattr__")
        own = own_of(value)
        return None if finds_more or own is None else Outside(own, key, MISSING, f"{name}.{key}")
    return None if hasattr(type(there), "__get__") else Outside(table, key, there, f"{name}.{key}")


def _descriptor(value: Any, kind: str, key: Any) -> Any:
    """The object in a class that an attribute is asked of, if it is one of the user's own; else `MISSING`."""
    if kind == "item" or _is_torchs(value):
        return MISSING
    there = inspect.getattr_static(value, key, MISSING)
    if there is MISSING or is_pythons_own(type(there)) or not hasattr(type(there), "__get__"):
        return MISSING
    return there


def _has_itself(value: Any, key: Any) -> bool:
    """Whether an object has an attribute, or a container an item, of its own and not from its class."""
    if is_a(value, (dict, list, tuple)) or key in (own_of(value) or ()):
        return True
    return isinstance(inspect.getattr_static(value, key, None), MemberDescriptorType)


def counts_as_torchs(value: Any) -> bool:
    """Whether a class is torch's or Python's own."""
    module = sys.modules.get(_home(value))
    return module is not None and is_known(vars(module))


def _is_torchs(value: Any) -> bool:
    """Whether a global is a tensor, a weak proxy, or a module or class of torch or of Python itself."""
    if is_a(value, (torch.Tensor, *weakref.ProxyTypes)):
        return True
    if not is_a(value, (ModuleType, type)):
        return False
    module = sys.modules.get(_home(value))
    return module is not None and is_known(vars(module))


def _home(value: Any) -> str:
    """The name of a module, or of the one that a class is from."""
    return str(value.__name__ if is_a(value, ModuleType) else value.__module__)


def is_known_thing(value: Any) -> bool:
    """Whether a thing has no methods of the user's own: plain values, tensors, modules, functions, containers."""
    known = (torch.Tensor, nn.Module, ModuleType, type, FunctionType, dict, list, set, deque, tuple)
    if lasts(value) or is_a(value, known):
        return True
    module = sys.modules.get(str(type(value).__module__))
    return module is not None and is_known(vars(module))
