"""The code that a function may run, as far as names lead: helpers, methods, and what decorators stand around."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ariadne.guards.attributes import is_a, is_memory, own_of
from ariadne.guards.classes import own_dict
from ariadne.guards.instructions import globals_in
from ariadne.guards.links import is_known

# Functions in all; entries of a container, and steps from a name, that are looked at.
_MOST, _SHORT, _DEPTH = 5000, 256, 4
_ALWAYS = frozenset({"__init__", "__call__", "__enter__", "__exit__"})  # of classes: these run without being named
_OF_MODULES = frozenset({"forward", "__call__"})  # each module is asked by itself


def codes_of(things: Iterable[tuple[Any, Any]]) -> Iterator[CodeType]:
    """The code of functions, each with the object whose method it is or None, and of all that they name: not of torch's, nor of
    Python's own."""
    todo, seen, kept = [*things], set[tuple[int, int]](), list[Any]()
    while todo and len(seen) < _MOST:
        thing, owner = todo.pop()
        if (id(thing), id(owner)) in seen:
            continue
        seen.add((id(thing), id(owner)))
        kept.append(thing)  # so that its id lasts
        if is_a(thing, FunctionType):
            todo += [(inner, owner) for inner in inside(thing)]
            if not is_known(thing.__globals__):
                codes = [*_with_inner(thing.__code__)]
                yield from codes
                names = frozenset(name for code in codes for name in code.co_names)
                todo += _meant(names, frozenset().union(*map(globals_in, codes)), thing.__globals__, owner)
                todo += (pair for v in _cells(thing) for pair in _reached(v, names, owner, _DEPTH))
        else:
            todo += ((inner, thing.__self__ if is_a(thing, MethodType) else owner) for inner in around(thing))


def around(thing: Any) -> list[Any]:
    """The functions that a method, a property, a partial function and the like stand for."""
    if is_a(thing, (staticmethod, classmethod, MethodType)):
        return [thing.__func__]
    if is_a(thing, property):
        return [f for f in (thing.fget, thing.fset) if f is not None]
    if is_a(thing, cached_property):
        return [thing.func]
    if is_a(thing, partial):
        return [v for v in (thing.func, *thing.args, *thing.keywords.values()) if callable(v)]
    return [thing.__wrapped__] if is_memory(thing) else []


def inside(f: FunctionType) -> Iterator[Any]:
    """The functions that stand in the variables around this one, as `@torch.no_grad()` and `functools.wraps` put them there; those
    of one of Python's own in a dict, too, as `functools.singledispatch` has them."""
    for value in _cells(f):
        by_type = type(value) is dict and len(value) <= _SHORT and is_known(f.__globals__)
        for one in value.values() if by_type else [value]:
            if is_a(one, (FunctionType, MethodType, partial)) or is_memory(one):
                yield one


def _cells(f: FunctionType) -> Iterator[Any]:
    for cell in f.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if is_a(constant, CodeType):
            yield from _with_inner(constant)


def _meant(names: frozenset[str], own: frozenset[str], table: dict[str, Any], owner: Any) -> Iterator[tuple[Any, Any]]:
    """What the names in a function may mean: its `own` among its globals, all of them of the object whose method it is."""
    for name in own & table.keys():
        yield from _reached(table[name], names, owner, _DEPTH)
    if owner is not None and not is_a(owner, type):
        yield from _of_class(type(owner), names, owner)
        held = own_of(owner) or {}
        for name in names & held.keys():
            yield from _reached(held[name], names, owner, _DEPTH)
        for name in names & held.get("_modules", {}).keys():
            yield from _reached(held["_modules"][name], names, owner, _DEPTH)


def _reached(value: Any, names: frozenset[str], owner: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """The functions that these names lead to from a value."""
    if depth == 0:
        return
    if is_a(value, (FunctionType, MethodType, partial)) or is_memory(value):
        yield value, owner
    elif is_a(value, ModuleType):
        if not is_known(vars(value)):
            for name in names & vars(value).keys():
                yield from _reached(vars(value)[name], names, owner, depth - 1)
    elif is_a(value, type):
        yield from _of_class(value, names | _ALWAYS, None)
    elif type(value) in (list, tuple, dict):
        for inner in (value.values() if type(value) is dict else value) if len(value) <= _SHORT else ():
            yield from _reached(inner, names, owner, depth - 1)
    else:
        yield from _of_class(type(value), names - _OF_MODULES if is_a(value, nn.Module) else names | _ALWAYS, value)


def _of_class(cls: type, names: frozenset[str], owner: Any) -> Iterator[tuple[Any, Any]]:
    for base in cls.__mro__[:-1]:
        if is_known({"__name__": base.__module__}):
            continue
        table = own_dict(base)
        for name in names & table.keys():
            if is_a(table[name], FunctionType) or around(table[name]):
                yield table[name], owner
