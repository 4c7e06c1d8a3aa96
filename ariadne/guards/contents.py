"""Contents: what a container holds, read and put back by the methods of Python's own class: its own class may have others."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)


def _own(thing: Any) -> Any:
    return next(kind for kind in _KINDS if issubclass(type(thing), kind))


def contents_of(thing: Any) -> Any:
    """A plain copy of a dict, a set, a list or a deque: as a dict, a set or a list."""
    own = _own(thing)
    if issubclass(own, dict):
        return dict(dict.items(thing))
    return set(set.__iter__(thing)) if own is set else [*own.__iter__(thing)]


def refill(thing: Any, contents: Any) -> None:
    """Have a dict, a set, a list or a deque hold this and nothing else."""
    own = _own(thing)
    own.clear(thing)
    if issubclass(own, dict):
        for key, value in contents.items():
            own.__setitem__(thing, key, value)
    elif own is set:
        set.update(thing, contents)
    else:
        own.extend(thing, contents)
