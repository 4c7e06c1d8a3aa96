"""Within: what stands in Python modules, on functions and on tensors to which something that forward read leads.

A chain in forward's code tells what it reads of a module that is a variable. One that an attribute, a list, a closed-over variable
or a default holds is read by code that may stand anywhere; so are a number that was set on a function, and one on a tensor. What
stands there under the names in the code that ran is guarded, and that nothing does under the others, for which forward may
have gone on with a default: all of it would be torch's and Python's own library, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ariadne.guards.attributes import Slots, is_a, is_array, is_memory, lasts, own_of
from ariadne.guards.classes import Lookup
from ariadne.guards.codes import around
from ariadne.guards.counted import Names
from ariadne.guards.functions import contents
from ariadne.guards.instructions import assigned_in
from ariadne.guards.kept import Members, Same
from ariadne.guards.links import is_known
from ariadne.guards.opened import State, counts_by_which, only_answers
from ariadne.guards.outside import PARTS, Outside, in_class, objects_in, with_contents

_TELLING = frozenset(
    {"signature", "getfullargspec", "__defaults__", "__kwdefaults__"}
)  # names by which code asks for defaults
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LARGE, _MOST = 4096, 1 << 16  # so many entries of a container, and so many things in all, are looked at


def within(kept: Iterable[Any], outside: Iterable[Outside], names: Names, aside: Collection[int]) -> list[Outside]:
    """What stands under forward's names in the modules and on the functions and tensors that these lead to.

    `kept`: what guards hold of attributes. `aside`: ids of tensors that a plan reads anew at each call, which `Marks` looks at.
    """
    looking = _Within(names)
    looking.seen.update(dict.fromkeys(aside))
    for value in kept:
        looking.enter(value.thing if is_a(value, Same) else value)
    for one in outside:
        is_global = type(one.table) is dict and is_a(one.value, ModuleType) and "__name__" in one.table
        if not (is_global and is_known(vars(one.value))):  # of torch's, a chain has told what was read
            looking.enter(one.value, is_a(one.value, FunctionType) and _means_it(one.table))
        looking.enter(one.kept)
    return [*looking.found(), *looking.there()]


def _means_it(table: Any) -> bool:
    """Whether this is where code has functions by their own names: a class, or the globals of a file."""
    return is_a(table, Lookup) or (type(table) is dict and ("__name__" in table or "__module__" in table))


class _There(Lookup):
    """A function or a module, to be asked by any key for the names that stand on it: those of `names`, or all but Python's own."""

    __slots__ = ("names",)

    def __init__(self, thing: Any, names: Collection[str] | None, ignored: Collection[str]) -> None:
        self.thing, self.dicts, self.names = thing, [vars(thing)], (names, ignored)

    def __getitem__(self, key: str) -> tuple[str, ...]:
        names, ignored = self.names
        own = self.dicts[0]
        there = [n for n in own if n[:2] != "__" and (names is None or n in names)] if own else []
        return tuple(sorted({*there}.difference(ignored)))


class _Within:
    def __init__(self, names: Names) -> None:
        self.names = names
        self.which = None if names.any else names.names
        self.todo = deque[Any]()
        self.seen: dict[int, Any] = {}
        self.things: set[int] = set()  # those of them that code may have otherwise than by names that mean them
        self.owners: list[
            tuple[Any, str, Collection[str]]
        ] = []  # and what may come to stand on these; names that may not

    def enter(self, value: Any, by_name: bool = False) -> None:
        if not (value is None or lasts(value)):
            self.todo.append(value)
            if not by_name:
                self.things.add(id(value))

    def found(self) -> Iterator[Outside]:
        while self.todo and len(self.seen) < _MOST:
            thing = self.todo.popleft()
            if id(thing) in self.seen or id(thing) in self.names.moved:
                continue
            self.seen[id(thing)] = thing
            if is_a(thing, FunctionType):
                self.enter_parts(thing)
                yield from self.on(thing, thing.__qualname__)
            elif is_memory(thing):
                self.enter(thing.__wrapped__)
                yield from self.on(thing, getattr(thing, "__qualname__", "a function"))
            elif is_a(thing, torch.Tensor):
                yield from self.on(thing, "a tensor")
            elif is_a(thing, ModuleType):
                yield from self.of_module(thing)
            else:
                self.enter_all(thing)

    def read_in(self, own: dict[str, Any]) -> Collection[str]:
        """The names in a dict of attributes by which forward may have read them."""
        return own.keys() if self.which is None else own.keys() & self.which

    def there(self) -> Iterator[Outside]:
        """Which names stand on the functions and modules that were found, so that none is missed that comes later; and what the
        functions default to, where forward asks that."""
        asked = () if _TELLING.isdisjoint(self.names.names) else PARTS
        for thing, called, ignored in self.owners:
            if id(thing) not in self.things:
                continue
            if id(vars(thing)) not in self.names.moved:
                there = _There(thing, self.which, ignored)
                yield Outside(there, "", there[""], f"what stands on {called}")
            for part in asked if is_a(thing, FunctionType) else ():
                yield from with_contents(Outside(Slots(thing), part, getattr(thing, part), f"{part} of {called}"))

    def enter_parts(self, function: FunctionType) -> None:
        """Go on to what a function closes over, wraps or defaults to."""
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for thing in (*map(contents, function.__closure__ or ()), *given, function.__dict__.get("__wrapped__")):
            self.enter(thing)

    def enter_all(self, thing: Any) -> None:
        """Go on to what stands in a container, and to the functions behind something that can be called."""
        if is_a(thing, (State, Members)):
            found: Iterable[Any] = thing.held
        elif is_a(thing, dict):
            found = dict.values(thing) if dict.__len__(thing) <= _LARGE else ()
        elif is_a(thing, _CONTAINERS):
            kind: Any = next(k for k in _CONTAINERS if is_a(thing, k))
            found = kind.__iter__(thing) if kind.__len__(thing) <= _LARGE else ()
        elif is_a(thing, partial):
            found = (thing.func, thing.args, thing.keywords)
        else:
            found = (thing.__func__,) if is_a(thing, MethodType) else around(thing)
        of_class = is_a(thing, (property, cached_property, classmethod))
        for inner in found:
            self.enter(inner, of_class)

    def on(self, thing: Any, called: str) -> Iterator[Outside]:
        """What Python set on a function or a tensor."""
        own = own_of(thing) or {}
        if not is_a(thing, torch.Tensor) and not is_known(getattr(thing, "__globals__", {})):  # of these, `Marks` knows
            self.owners.append((thing, called, self.names.assigned))
        for name in sorted(self.read_in(own)) if own else ():
            if name not in self.names.assigned and name[:2] != "__":
                yield from self.at(own, name, f"{called}.{name}")

    def of_module(self, module: ModuleType) -> Iterator[Outside]:
        """What stands in a Python module; of torch's, its functions; nothing of Python's own and numpy's, as everywhere."""
        own, called = vars(module), module.__name__
        known = is_known(own)
        if known and called.partition(".")[0] != "torch":
            return
        file = own.get("__file__")
        homes = (code for code in self.names.codes if file is None or code.co_filename == file)
        changed = self.names.assigned.union(*(assigned_in(code)[1] for code in homes))
        if not known:
            self.owners.append((module, called, changed))
        plain = {n for n, value in own.items() if lasts(value)} if self.which is None else set[str]()
        for name in sorted((own.keys() & self.names.names | plain) - changed):
            if name[:2] != "__" and (not known or callable(own[name]) or is_a(own[name], ModuleType)):
                yield from self.at(own, name, f"{called}.{name}")

    def at(self, table: dict[str, Any], name: str, called: str) -> Iterator[Outside]:
        """What stands in one place, with what is in it; not what forward itself changes."""
        value, names = table[name], self.names
        if names.moves(value) or id(value) in names.moved or only_answers(value, names.codes, names.by_name):
            return
        one = Outside(table, name, value, called)
        self.enter(value)
        if lasts(value) or counts_by_which(value):
            yield one
            if is_a(value, type):
                yield from in_class(value, names.names, names.assigned, names.moved)
        elif is_a(value, _CONTAINERS) or is_array(value):
            for inner in with_contents(one):
                yield inner
                yield from objects_in(inner, self.which, names.assigned, names.moved)
        else:
            kept = State(value, self.which, names.assigned, names.moved)
            self.enter(kept)
            yield Outside(table, name, value, called, kept=kept)
