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
        return dict(own.items(thing))  # an OrderedDict's order is another one than that of the dict below it
    return set(set.__iter__(thing)) if own is set else [*own.__iter__(thing)]


def members_of(thing: Any) -> list[Any]:
    """What is in a set or a frozenset, whatever its class makes of going through it."""
    own: Any = set if issubclass(type(thing), set) else frozenset
    return [*own.__iter__(thing)]


def refill(thing: Any, contents: Any) -> None:
    """Have a dict, a set, a list or a deque hold this and nothing else, in this order.

    What belongs there stays where it is meanwhile: another thread may look into it.
    """
    own = _own(thing)
    if issubclass(own, dict):
        _refill_dict(own, thing, contents)
    elif own is set:
        kept = {*map(id, contents)}
        set.difference_update(thing, [member for member in set.__iter__(thing) if id(member) not in kept])
        set.update(thing, contents)
    elif own is list:
        list.__setitem__(thing, slice(None), contents)
    else:
        for at, value in enumerate(contents[: deque.__len__(thing)]):
            if deque.__getitem__(thing, at) is not value:
                deque.__setitem__(thing, at, value)
        for _ in range(deque.__len__(thing) - len(contents)):
            deque.pop(thing)
        deque.extend(thing, contents[deque.__len__(thing) :])


def _refill_dict(own: Any, thing: Any, contents: Any) -> None:
    for key in [key for key in own.__iter__(thing) if key not in contents]:
        own.__delitem__(thing, key)
    for key, value in contents.items():
        if own.get(thing, key, own) is not value:
            own.__setitem__(thing, key, value)
    pairs = enumerate(zip(own.__iter__(thing), contents, strict=True))
    first = next((at for at, (key, belongs) in pairs if key is not belongs), len(contents))
    for key in [*contents][first:]:  # each to the end, by the key itself, where another that is equal may stand
        own.__delitem__(thing, key)
        own.__setitem__(thing, key, contents[key])
