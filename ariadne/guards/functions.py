"""Functions: which Python functions are reached from the places that forward reads."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property, partial, singledispatchmethod
from typing import Any

from torch import nn

from ariadne.guards.attributes import is_a

_WRAPPERS = ("__wrapped__", "__func__", "func", "fget", "dispatcher")
_DESCRIPTORS = (cached_property, singledispatchmethod)
_MOST = 20_000  # things looked at


def reached(roots: Iterable[Any]) -> Iterator[types.FunctionType]:
    """The Python functions that these things lead to: themselves, and what they wrap, close over, hold or default to.

    Nothing is run for it. Modules and objects are not entered.
    """
    todo, seen = deque(roots), set[int]()
    while todo and len(seen) < _MOST:
        thing = todo.popleft()
        if id(thing) in seen or is_a(thing, (type, nn.Module)):
            continue
        seen.add(id(thing))
        if is_a(thing, types.FunctionType):
            yield thing
            todo.extend(contents(cell) for cell in thing.__closure__ or ())
            todo.extend(thing.__defaults__ or ())
            todo.extend((thing.__kwdefaults__ or {}).values())
            todo.extend(thing.__dict__[name] for name in _WRAPPERS if name in thing.__dict__)
        elif type(thing) in (list, tuple) and len(thing) <= 256:
            todo.extend(thing)
        elif type(thing) is dict and len(thing) <= 256:
            todo.extend(thing.values())
        elif is_a(thing, partial):
            todo.extend((thing.func, *thing.args, *thing.keywords.values()))
        elif is_a(thing, (types.MethodType, staticmethod, classmethod, property, *_DESCRIPTORS)) or (
            type(thing).__name__ == "_lru_cache_wrapper"
        ):
            todo.extend(getattr(thing, name) for name in _WRAPPERS if hasattr(thing, name))


def behind(thing: Any) -> Iterator[Any]:
    """The objects behind something that can be called: that of a method, what a partial function was given, the thing itself."""
    if is_a(thing, partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            yield from behind(part)
    else:
        yield thing.__self__ if is_a(thing, types.MethodType) else thing


def contents(cell: types.CellType) -> Any:
    """What stands in a cell; the cell itself where nothing does."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def made_inside(code: types.CodeType) -> Iterator[int]:
    """The ids of the codes of functions that a function makes each time it runs."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield id(constant)
            yield from made_inside(constant)
