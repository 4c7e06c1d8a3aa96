"""Searched: what a search through Python objects read, so that its result is known to hold as long as all of it stands.

A model is looked through before each run of its forward, and after most of them everything stands as it stood.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn

from ariadne.guards.attributes import MISSING, is_a, own_of, slot_of, slots_of
from ariadne.guards.codes import around
from ariadne.guards.contents import contents_of
from ariadne.guards.versions import VERSION

Found = TypeVar("Found")
TENSORS_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Read:
    """What a search read: dicts, and what else may come to hold, or to be, something else."""

    def __init__(self) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._things: dict[int, Any] = {}
        self._modules: dict[str, ModuleType | None] = {}

    def table(self, table: dict[Any, Any]) -> None:
        """Take note of a dict."""
        self._dicts[id(table)] = table

    def thing(self, thing: Any) -> None:
        """Take note of an object, a container, a class, a function, a cell or a tensor, with the dicts that it has of its own."""
        if id(thing) in self._things:
            return
        self._things[id(thing)] = thing
        tables = _state(thing) if is_a(thing, (FunctionType, torch.Tensor, partial)) else [thing]
        for table in (*tables, None if is_a(thing, (type, torch.Tensor)) else own_of(thing)):
            if is_a(table, dict):
                self.table(table)

    def module(self, module: nn.Module) -> None:
        """Take note of a module, with its registries."""
        self.thing(module)
        for table in module.__dict__.values():
            if is_a(table, dict):
                self.table(table)

    def imported(self, name: str) -> ModuleType | None:
        """The module of this name, if it is there."""
        found = self._modules[name] = sys.modules.get(name)
        return found

    def named(self) -> Iterator[dict[Any, Any]]:
        """The dicts of classes and of Python's modules among them."""
        tables = (table for table in self._dicts.values() if type(table) is dict)
        return (table for table in tables if "__module__" in table or "__builtins__" in table)

    def things(self) -> Iterator[Any]:
        """What else was noted."""
        return iter([*self._things.values()])

    def modules(self) -> dict[str, ModuleType | None]:
        """The modules that were looked for by name."""
        return dict(self._modules)

    def stood(self) -> Stood:
        """All of it as it is now."""
        return Stood([*self._dicts.values()], [*self._things.values()], self._modules)


class Code:
    """The code that a search came to: what can be called in the classes that it read, and among globals by the names that it met.

    It holds no object of a model, which it may outlive.
    """

    def __init__(self, read: Read, met: Set[str]) -> None:
        self._met = met
        self._tables = [*read.named()]
        functions = [thing for thing in read.things() if type(thing) is FunctionType]
        self._functions = [*map(ref, functions)]
        self._closing = [ref(f) for f in functions if f.__closure__]
        self._modules = read.modules()
        self._versions = self._now()  # first: a write in between shows
        self._named = [*map(self._callable_in, self._tables)]
        self._codes = [*map(_code_of, self._functions)]
        self._inside = [*map(_closed_over, self._closing)]

    def _now(self) -> list[int]:
        return [*map(VERSION, self._tables)] if VERSION is not None else [-1] * len(self._tables)

    def _callable_in(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """What stands for code there: functions, classes, modules, and what stands around functions."""
        names = [*table] if "__module__" in table else self._met & table.keys()
        found = ((name, table.get(name)) for name in names)
        return {name: _mark(v) for name, v in found if is_a(v, _CODE)}

    def stands(self) -> bool:
        """Whether all of it is still what it was, under the same names."""
        now = self._now()
        if next(self.moved(), None) is not None:
            return False
        self._versions = now
        return all(sys.modules.get(name) is module for name, module in self._modules.items())

    def moved(self) -> Iterator[tuple[str, str, Any, Any]]:
        """What is otherwise: in words, by which name, and what told which it was and tells which it is; None for nothing. What may
        be called by any name has none."""
        now = self._now()
        if now != self._versions or -1 in now:
            for at in [at for at, (n, was) in enumerate(zip(now, self._versions, strict=True)) if n != was or n < 0]:
                yield from _otherwise(self._named[at], self._callable_in(self._tables[at]))
        for function, was in zip(self._functions, self._codes, strict=True):
            if (code := _code_of(function)) is not was and code is not None:
                yield f"the code of {getattr(function(), '__qualname__', '')}", "", was, code
        for function, inside in zip(self._closing, self._inside, strict=True):
            if (found := _closed_over(function)) != inside and found is not None:
                yield from _otherwise(inside or {}, found)


def _otherwise(was: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    found = ((repr(name), name, was.get(name), now.get(name)) for name in dict.fromkeys((*was, *now)))
    return (one for one in found if one[2] != one[3])


def _closed_over(function: ref[Any]) -> dict[str, Any] | None:
    """The same in the variables that a function closes over; None once it is gone."""
    f = function()
    if f is None:
        return None
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=False)
    held = ((name, cell.cell_contents) for name, cell in cells if cell != _EMPTY)
    return {name: _mark(v) for name, v in held if is_a(v, _CODE)}


def _mark(thing: Any) -> Any:
    """What tells one from another that came later, which may get the id of the first."""
    if is_a(thing, (type, ModuleType)):
        return ref(thing)
    return id(thing), *(getattr(f, "__code__", None) for f in around(thing) or [thing])


def _code_of(function: ref[Any]) -> Any:
    return getattr(function(), "__code__", None)


class Stood:
    """What a search read, as it was."""

    def __init__(
        self, dicts: list[dict[Any, Any]], things: list[Any], modules: Mapping[str, ModuleType | None]
    ) -> None:
        self._dicts, self._things, self._modules = dicts, things, modules
        # Most are registries of modules in which nothing is.
        self._held = [*map(_copy, dicts)]
        self._states = [*map(_state, things)]

    def stands(self) -> bool:
        """Whether each of these things still is what it was, and holds the same."""
        return (
            all(map(_holds_same, self._dicts, self._held))
            and all(map(_same, map(_state, self._things), self._states))
            and all(sys.modules.get(name) is module for name, module in self._modules.items())
        )


def _copy(table: dict[Any, Any]) -> dict[Any, Any]:
    if not dict.__len__(table):
        return _NOTHING
    return table.copy() if type(table) is dict else dict(dict.items(table))  # one of the user's may give other things


def _holds_same(table: dict[Any, Any], was: dict[Any, Any]) -> bool:
    if not was:
        return not dict.__len__(table)
    same = dict.__len__(table) == len(was) and all(map(is_, dict.values(table), was.values()))
    return same and all(map(is_, dict.keys(table), was))


@contextmanager
def searched_once() -> Iterator[None]:
    """A block in which a search through the same modules is done again only once something that it read is otherwise."""
    if _KEPT.get() is not None:
        yield
        return
    kept: dict[tuple[int, ...], tuple[Any, Stood, Any]] = {}
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        kept.clear()  # a context that forward has copied holds it still
        _KEPT.reset(token)


def found_again(modules: Mapping[str, nn.Module], search: Callable[[], tuple[Read, Found]]) -> Found:
    """What a search through these modules finds, or found before, if all that it read then stands."""
    kept, key = _KEPT.get(), tuple(map(id, modules.values()))
    if kept is not None and key in kept and kept[key][1].stands():
        before: Found = kept[key][2]
        return before
    read, found = search()
    if kept is not None:
        kept[key] = modules, read.stood(), found
    return found


_KEPT: ContextVar[dict[tuple[int, ...], tuple[Any, Stood, Any]] | None] = ContextVar("kept", default=None)
_HOLDING = (list, deque, set)
_CODE = (FunctionType, MethodType, type, ModuleType, staticmethod, classmethod, property, cached_property, partial)
_NOTHING: dict[Any, Any] = {}
_EMPTY = CellType()


def _same(now: list[Any], was: list[Any]) -> bool:
    return len(now) == len(was) and all(map(is_, now, was))


def _state(thing: Any) -> list[Any]:
    """What a thing is and holds beside dicts, by identity."""
    kind = type(thing)
    if kind is FunctionType:
        return [thing.__code__, thing.__name__, thing.__defaults__, thing.__kwdefaults__]
    if kind is CellType:
        return [thing.cell_contents if thing != CellType() else MISSING]
    if is_a(thing, type):
        return [kind, thing.__mro__]
    if is_a(thing, torch.Tensor):
        return [getattr(thing, table, None) for table in TENSORS_HOOKS]
    if is_a(thing, partial):
        return [kind, thing.func, thing.args, thing.keywords]
    held = contents_of(thing) if is_a(thing, _HOLDING) else ()
    return [kind, *held, *(slot_of(thing, name) for name in slots_of(thing))]
