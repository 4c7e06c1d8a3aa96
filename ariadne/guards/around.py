"""Surroundings: what forward's own functions read outside of the model's attributes, and the names by which they read.

A plan holds the numbers that such reads gave, so a guard has to know of them. They are found in the code of each function that
ran, as chains of attributes and constant keys (`getattr` and `hasattr` with a constant name, too) that start at a global, or at
an argument or a variable of a function around that belongs to the model, or that a global led to. Where a chain ends at a
container, all that is in it counts; where it ends at an object, all that code which ran has names for (`opened`); where it ends at
a function or a tensor, which one it is. So do the methods that ran, the code, the defaults and the closed-over variables of
functions, environment and context variables, and the switches of torch that were asked for.
"""

from __future__ import annotations

import builtins
import io
import logging
import operator
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ariadne.guards import switches
from ariadne.guards.attributes import (
    ANY,
    BOOKKEEPING,
    MISSING,
    PYTHONS_FILES,
    is_a,
    is_array,
    is_bare,
    is_fixed,
    is_opaque,
    is_open,
    is_pythons_own,
    is_torchs_own,
    lasts,
    own_of,
)
from ariadne.guards.classes import Below, home_of
from ariadne.guards.codes import around
from ariadne.guards.functions import behind, made_inside, reached
from ariadne.guards.kept import Defaults
from ariadne.guards.kinds import ASKING, asked_kind
from ariadne.guards.links import (
    absolute,
    counts_as_torchs,
    descriptor_of,
    found_by_class,
    has_itself,
    hiding,
    is_known,
    is_torchs,
    kind_for,
    link_of,
    method_of,
    static,
)
from ariadne.guards.opened import State, asked_of, asks_by_name, counts_by_which, is_closed, only_answers, shows_nothing
from ariadne.guards.outside import (
    Itself,
    Opened,
    Outside,
    Variable,
    add_to,
    in_class,
    kinds_in,
    objects_in,
    of_decimal,
    of_function,
    of_wrapper,
    with_contents,
)
from ariadne.guards.readers import TOLD, Reads
from ariadne.guards.steps import IMPORT_MODULE, NO_CODE, Chain, Code, Dropped, starts_with, texts
from ariadne.guards.world import ASKED, Question, asker

_CONTAINERS = (dict, list, set, frozenset, deque, tuple)
_IDENTITY = (operator.is_, operator.is_not)
_BY_NAME = (getattr, hasattr)
_LOOKED_AT = frozenset((*_BY_NAME, *_IDENTITY, *ASKED))
_BETWEEN = ("os", "collections.abc", "_collections_abc", "ariadne.capture.recorded")  # between who asks and what tells
_LOGGERS = (logging.Logger.getEffectiveLevel.__code__, logging.Logger.isEnabledFor.__code__)
_ENVIRONMENT: CodeType | None = getattr(getattr(type(os.environ), "__getitem__", None), "__code__", None)


def of_numpy() -> tuple[Any, ...]:
    """Numpy's own generator and its modules, where numpy was imported."""
    numbers = getattr(sys.modules.get("numpy"), "random", None)
    if numbers is None:
        return ()
    functions = (getattr(numbers, name) for name in ("seed", "sample", "ranf"))  # those that are no methods
    return (numbers, numbers.mtrand, numbers.mtrand._rand, *functions)


@dataclass
class Surroundings:
    """What the functions that ran have read, as it was when each ran first.

    `belongs` tells the objects that the model holds. `names`: all names and texts in the code of these functions; an attribute of
    an object that goes by none of them was not read, unless `ANY` is among them, or the object among those read as a `whole`.
    `switches`: the settings of torch that were asked for.
    """

    belongs: Callable[[Any], bool]
    numpys: tuple[Any, ...] = ()  # numpy's own generator, and what leads to it
    found: dict[tuple[int, Any, Any], Outside] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    whole: dict[int, Any] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)  # attributes that the code assigns
    filled: set[str] = field(default_factory=set)  # attributes that it reads where it puts something into a container
    quiet: set[int] = field(default_factory=set)  # codes that read nothing that counts
    drew: set[str] = field(default_factory=set)  # from Python's own generator; from numpy's, if a name leads there
    switches: set[str] = field(default_factory=set)
    codes: set[CodeType] = field(default_factory=set)  # of functions of the user's
    by_name: set[str] = field(default_factory=set)  # names of which only a variable told
    reads: Reads = field(default_factory=Reads)
    which: set[str] = field(default_factory=set)  # what they ask of things by which they are
    compared: str = ""  # one that compares things by identity in C
    deaf: bool = False  # whether what ran put another profiler in the place of the one that looks on
    importing: FrameType | None = None  # a module that torch imports for the first time
    world: dict[str, Question] = field(default_factory=dict)  # what they ask the machine
    _reads: dict[int, Code] = field(default_factory=dict)
    _seen: set[tuple[int, ...]] = field(default_factory=set)  # two modules may hold equal code
    _others: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    _outer: dict[int, tuple[Any, str]] = field(default_factory=dict)  # objects outside of the model, and their names
    _opened: dict[int, Opened] = field(default_factory=dict)
    _models: dict[int, Any] = field(
        default_factory=dict
    )  # things that the model holds, and that functions may be given
    _roots: list[Any] = field(default_factory=list)  # further things that lead to functions
    _later: list[tuple[Chain, dict[str, Any], Code]] = field(default_factory=list)  # what they import was not there yet
    _made: set[int] = field(default_factory=set)  # codes of functions that forward makes as it runs
    _began: dict[int, dict[str, list[Any]]] = field(default_factory=dict)  # what closed-over variables held, by code

    def note(self, frame: FrameType) -> None:
        """Look at the code of a call; of torch's or Python's own, only at the names in it, and at the functions it calls."""
        code, table = frame.f_code, frame.f_globals
        if code is IMPORT_MODULE and isinstance(imported := frame.f_locals.get("name"), str):
            self._later.append((Chain(imported, imported=True), table, NO_CODE))
        if id(table) not in self._others:
            self._others[id(table)] = is_known(table), table
        others = self._others[id(table)][0]
        if id(code) not in self._reads:
            home = str(table.get("__name__"))
            if home.partition(".")[0] != "ariadne" and not is_torchs_own(home):
                self.names.update(code.co_names, texts(code.co_consts))
                self.switches |= switches.named(code.co_names)
            self._reads[id(code)] = Code.of(code, others, home)
            if not others:
                self.codes.add(code)
                self._made.update(made_inside(code))
                self.assigned |= self._reads[id(code)].assigned
                self.filled |= self._reads[id(code)].filled
                self.which |= self._reads[id(code)].which
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
        given = frame.f_locals if variables or methods or starts_with(code) else {}
        if read.past_own and is_a(given.get(code.co_varnames[0]), nn.Module):
            self.which.add("static")
        for name in variables:
            if name in given and name not in read.owned:
                held_before = self._began.setdefault(id(code), {}).setdefault(name, [])
                if not any(given[name] is thing for thing in held_before):
                    held_before.append(given[name])
                self._enter(given[name], f"the variable {name!r} around {code.co_name}")
        for name in starts_with(code):
            if is_a(given.get(name), type) and not counts_as_torchs(given[name]):
                self._enter(given[name], given[name].__qualname__)
        mine = {name: given[name] for name in starts_with(code) if name in given and self.belongs(given[name])}
        outer = {name: given[name] for name in starts_with(code) if name in given and id(given[name]) in self._outer}
        kind = kind_for(given.get(code.co_varnames[0])) if methods else None
        at = (id(code), id(table), id(kind), *map(id, mine.values()), *map(id, outer.values()))
        if at in self._seen:
            return
        self._seen.add(at)
        for outside in method_of(kind, code) if kind is not None else ():
            add_to(self.found, outside)
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
                add_to(self.found, found)
        for chain in read.chains:
            for outside in self._read(chain, table, mine, outer, read, others):
                add_to(self.found, outside)

    @staticmethod
    def asks(function: Any) -> bool:
        """Whether a function of C's is one of those that `ask` looks at: few are, of thousands that are called."""
        return switches.asked(function) is not None or function in _LOOKED_AT or function.__name__ == "get"

    def ask(self, function: Any, frame: FrameType) -> None:
        """Look at a call of a function of C's."""
        name = switches.asked(function)
        if name is not None:
            if not switches.is_torchs_business(frame.f_globals.get("__name__")):
                self.switches.add(name)
        elif function in ASKED:
            if who := asker(frame):
                self.world.setdefault(ASKED[function], Question(who, [])).tables.append(frame.f_globals)
        elif function in _BY_NAME:
            read = self._reads.get(id(frame.f_code))
            told = {n for n in map(frame.f_locals.get, read.naming) if isinstance(n, str)} if read else set()
            self.names |= told
            self.by_name |= told
        elif function in _IDENTITY:
            if not is_known(frame.f_globals):
                self.compared = frame.f_code.co_name
        elif function.__name__ == "get" and type(function.__self__) is ContextVar:
            variable = function.__self__
            outside = Outside(Variable(variable), "", MISSING, f"the context variable {variable.name!r}")
            outside = replace(outside, value=outside.now())
            add_to(self.found, outside)
            if outside.value is not MISSING and not lasts(outside.value):
                self._enter(outside.value, outside.name)
                self._open(outside.value, outside.name, outside, False, False, ())

    def _of_torch(self, frame: FrameType) -> bool:
        """Whether a function of torch's or Python's own tells a switch, or a variable of the environment, which then counts."""
        switch = switches.asked_by(frame.f_code)
        if frame.f_code in _LOGGERS:
            asker, logger = frame.f_back, frame.f_locals.get("self")
            if asker is not None and not is_known(asker.f_globals):
                found = Outside(Itself(logger), "", logger, f"the logger {getattr(logger, 'name', '')!r}")
                known = self.found.get(found.place, found).kept
                self.found[found.place] = replace(found, kept=asked_of(logger, frame.f_locals.get("level"), known))
            return True  # another logger may be asked next
        if frame.f_code in ASKING:
            self.found.update({one.place: one for one in asked_kind(frame)})
            return True
        if switch is None and frame.f_code is not _ENVIRONMENT:
            return False
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__") in _BETWEEN:
            caller = caller.f_back
        if caller is None or switches.is_torchs_business(caller.f_globals.get("__name__")):
            return True
        if switch is not None:
            self.switches.add(switch)
        elif frame.f_locals.get("self") is os.environ and isinstance(key := frame.f_locals.get("key"), str):
            found = Outside(os.environ, key, MISSING, f"the environment variable {key!r}")
            add_to(self.found, replace(found, value=found.now()))
        return True

    def _read(
        self,
        chain: Chain,
        table: dict[str, Any],
        mine: Mapping[str, Any],
        outer: Mapping[str, Any],
        read: Code,
        others: bool,
    ) -> Iterator[Outside]:
        """What a chain passes on its way to a value that counts, as far as no other guard looks at it."""
        way: list[Outside] = []
        foreign = not chain.of_argument  # no attribute of the model led to it, whether one holds it or not
        if chain.of_argument:
            if chain.start in mine:
                value = mine[chain.start]
                name = type(value).__name__
                foreign = id(value) in self._outer and id(value) not in self._models
            elif chain.start in outer:
                value = outer[chain.start]
                foreign, name = id(value) not in self._models, self._outer[id(value)][1]
            else:
                return
        elif chain.imported:
            value, name = sys.modules.get(absolute(chain.start, table), MISSING), chain.start.lstrip(".")
            if value is MISSING:
                self._later.append((chain, table, read))
                return
        else:
            if chain.start not in table:
                if not others and not hasattr(builtins, chain.start):  # forward goes on without it
                    told = f"the global {table.get('__name__')}.{chain.start}"
                    yield Outside(table, chain.start, MISSING, told)
                return
            value, name = table[chain.start], f"the global {table.get('__name__')}.{chain.start}"
            way.append(Outside(table, chain.start, value, name))
        rest = deque(chain.links)
        if value is sys and [kind for kind, _ in chain.links[:2]] == ["attribute", "item"] and rest[0][1] == "modules":
            value, name, way = sys.modules.get(rest[1][1], MISSING), f"the module {rest[1][1]}", []
            rest = deque(chain.links[2:])
        while rest:
            kind, key = rest[0]
            if is_fixed(value):
                break
            link = link_of(value, kind, key, name)
            if link is None:
                self._enter(descriptor_of(value, kind, key), f"{type(value).__qualname__}.{key}")
                if not others:
                    yield from self._through_class(value, kind, key, name)
                if kind != "item" and is_a(there := static(value, key, None), singledispatchmethod):
                    self._roots.append(there)
                break
            rest.popleft()
            if not others and is_a(value, type):
                yield from hiding(value, link)
            # What an object of the model has itself, or a module from its class, is held already as the attribute that was read.
            if foreign:
                way.append(link)
            elif not (is_a(value, nn.Module) or has_itself(value, kind, key)):
                way.append(replace(link, owner=value))
            # What stands in a class is no model's own, nor is what is in that.
            foreign = foreign or not has_itself(value, kind, key)
            value, name = link.value, link.name
            if kind == "asked":
                break
        if self.numpys and self._draws_by_numpy(value):
            self.drew.add("numpy.random")
        if others:
            if callable(value) and not is_a(value, (type, nn.Module)):
                yield from way
            return
        if lasts(value) or value is MISSING:
            yield from way
            return
        outside = None
        if foreign:
            outside = way[-1] if way else Outside(Itself(value), "", value, name)
        elif not counts_by_which(value):
            self._models.setdefault(id(value), value)
            self._enter(value, name)
        if is_a(value, FunctionType):
            self._enter_defaults(value)
        if outside is not None and not is_a(value, ModuleType):
            yield from way[:-1]
            yield from [outside] if chain.start in read.owned else with_contents(outside)
            self._enter(value, name)
        idle = chain.entered if not rest else len(rest) == 1 and is_a(rest[0][1], Dropped)
        # What is read of a module of the model is noted, whatever led to it.
        self._open(value, name, None if self._is_own_module(value) else outside, read.wholesale, idle, rest)

    def _draws_by_numpy(self, value: Any) -> bool:
        """Whether a value is a method of numpy's own generator, or what leads to all of these."""
        owner = value.__self__ if type(value) in (MethodType, BuiltinMethodType) else value
        return any(owner is thing for thing in self.numpys)

    def _is_own_module(self, value: Any) -> bool:
        return is_a(value, nn.Module) and self.belongs(value)

    def _through_class(self, value: Any, kind: str, key: Any, name: str) -> Iterator[Outside]:
        """What in a class decides how an attribute is found: a method, a property, or that there is none."""
        if kind == "item" or is_torchs(value) or self._is_own_module(value):
            return
        for outside in found_by_class(value, key, name):
            yield outside
            for part in around(outside.value):
                self._take_names(part)
        if key == "__subclasses__" and is_a(value, type):
            below = Below(value)
            outside = Outside(below, key, below[key], f"the subclasses of {value.__qualname__}")
            yield outside
            for kind_below in value.__subclasses__():
                self._open(kind_below, kind_below.__qualname__, outside, False, False, ())

    def _take_names(self, thing: Any) -> None:
        """Take note of the names in a thing that reads attributes by them: an `operator.attrgetter`."""
        if asks_by_name(thing):
            self.names.update(part for text in texts(thing.__reduce__()[1]) for part in text.split("."))

    def _enter_defaults(self, function: FunctionType) -> None:
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._enter(value, f"a default argument of {function.__qualname__}")

    def _enter(self, value: Any, name: str) -> None:
        """Take note of an object outside of the model, which methods and functions that are called with it may look into."""
        if value is MISSING or lasts(value) or (is_a(value, _CONTAINERS) and not own_of(value)):
            return
        if is_a(value, type) or not counts_by_which(value):
            self._outer.setdefault(id(value), (value, name))

    def _open(
        self, value: Any, name: str, outside: Outside | None, whole: bool, idle: bool, rest: Sequence[tuple[str, Any]]
    ) -> None:
        """Take note of a thing that may hold more than chains tell, and of one that tells nothing though it was asked."""
        whole_kinds = (type, ModuleType, nn.Module)
        theirs = outside is not None and is_a(value, whole_kinds) and (is_a(value, nn.Module) or not is_torchs(value))
        if counts_by_which(value) and not theirs:
            return
        if type(value).__module__ == "decimal":
            self.names.add("Decimal")
        self._take_names(value)
        known = self._opened.get(id(value))
        if known is None:
            home = home_of(value)
            in_c = home is not object and not is_open(home)
            looked = not (theirs or is_a(value, _CONTAINERS) or is_array(value)) and (is_opaque(value) or in_c)
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
            if one.outside is None or one.idle or only_answers(one.thing, self.codes, self.by_name):
                continue
            names = None if one.whole else self._read_by()
            if id(one.thing) in defaults:
                yield replace(one.outside, kept=Defaults(one.thing, defaults[id(one.thing)]))
            elif is_a(one.thing, (ModuleType, nn.Module)):
                own = vars(one.thing)
                for name in self.names.intersection(own) - BOOKKEEPING - self.assigned:
                    if (lasts(own[name]) or is_a(own[name], FunctionType)) and name[:2] != "__":
                        yield Outside(own, name, own[name], f"{one.name}.{name}")
            elif is_a(one.thing, type):
                yield from in_class(one.thing, self.names, self.assigned, moved)
            elif not is_a(one.thing, _CONTAINERS) and not is_bare(one.thing):
                yield replace(one.outside, kept=State(one.thing, names, self.assigned, moved))
            else:
                for inner in with_contents(one.outside):
                    yield from objects_in(inner, names, self.assigned, moved)

    def _read_by(self) -> Collection[str]:
        """The names under which objects out there may have been read."""
        return self.names if "static" in self.which else {*self.names, *self.reads.names, TOLD}

    def lasting(
        self, roots: Iterable[Any] = (), hooks: Sequence[Any] = (), moved: Collection[int] = (),
        defaults: Mapping[int, dict[Any, Any]] = types.MappingProxyType({}),
    ) -> list[Outside]:  # fmt: skip
        """What was read and is still as it was: what forward itself changes tells nothing about the next call.

        With what may change of the functions that ran, among those that it leads to, or `roots` and `hooks` do; without the
        containers of which the ids are among `moved`; `defaults`: by a dict's id, what it put there where it was asked in vain.
        """
        for thing in hooks:
            for one in behind(thing):  # an object that is a hook, or that has a method as one
                if not (lasts(one) or counts_by_which(one)):
                    name = f"the {type(one).__qualname__} of a hook"
                    self._open(one, name, Outside(Itself(one), "", one, name, one), False, False, ())
        found = dict(self.found)
        for outside in of_decimal(self.names):
            found[outside.place] = outside
        later, self._later = self._later, []
        for chain, table, read in later:
            name = absolute(chain.start, table)
            if not chain.links and is_a(module := sys.modules.get(name), ModuleType):
                self._open(module, f"the module {name}", Outside(sys.modules, name, module, name), False, False, ())
            for outside in self._read(chain, table, {}, {}, read, False):
                add_to(found, outside)
        for function in reached([*(o.value for o in self.found.values()), *roots, *hooks, *self._roots]):
            code = self._reads.get(id(function.__code__))
            if code is None or id(function.__code__) in self._made:
                continue
            if not code.of_others:
                for outside in of_function(function, self._began.get(id(function.__code__), {}), code.owned):
                    if id(outside.value) in defaults:
                        outside = replace(outside, kept=Defaults(outside.value, defaults[id(outside.value)]))
                    add_to(found, outside)
                    for inner in objects_in(outside, self._read_by(), self.assigned, moved):
                        add_to(found, inner)
            elif function.__closure__ and function.__code__.co_filename.startswith(PYTHONS_FILES):
                for outside in of_wrapper(function):
                    add_to(found, outside)
        for outside in self._opened_outside(moved, defaults):
            found[outside.place] = outside
        for cls in {kind: None for outside in found.values() for kind in kinds_in(outside)}:
            for outside in in_class(cls, self.names, self.assigned, moved):
                add_to(found, outside)
        return [outside for outside in found.values() if outside.is_same()]
