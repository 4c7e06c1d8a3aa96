"""Versions of dicts: numbers that grow when a dict is written, which torch's own compiler asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

_Version = Callable[[dict[Any, Any]], int]
dict_version: _Version | None = getattr(torch._C._dynamo.guards, "dict_version", None)


def tells(version: _Version) -> bool:
    """Whether every way to write into a module's dicts makes their versions larger here. CPython keeps these in several ways."""
    module: Any = nn.Module()
    own = module.__dict__
    own_changes: list[Callable[[], Any]] = [
        lambda: setattr(module, "watched", 1),
        lambda: setattr(module, "watched", 2),
        lambda: object.__setattr__(module, "watched", 3),
        lambda: own.__setitem__("watched", 4),
        lambda: own.update(watched=5),
        lambda: delattr(module, "watched"),
        module.eval,
        module.train,
    ]
    member_changes: list[Callable[[], Any]] = [
        lambda: setattr(module, "part", nn.ReLU()),
        lambda: setattr(module, "part", nn.Tanh()),
        lambda: module._modules.update(part=nn.ReLU()),
        lambda: delattr(module, "part"),
    ]
    plain: dict[str, int] = {}
    plain_changes: list[Callable[[], Any]] = [
        lambda: plain.update({"a": 1, "b": 2}),  # into an empty one, which an interpreter may do as a clone
        lambda: plain.setdefault("c", 3),
        lambda: plain.__ior__({"a": 4}),
        lambda: plain.pop("a"),
        plain.popitem,
        plain.clear,
    ]
    changes = [(own, change) for change in own_changes]
    changes += [(module._modules, change) for change in member_changes]
    changes += [(plain, change) for change in plain_changes]
    changes += [(module._parameters, lambda: module.register_parameter("watched", None))]
    for _ in range(20):  # an interpreter may go other ways once it has seen something often
        for table, change in changes:
            before = version(table)
            if version(table) != before:
                return False
            change()
            if version(table) <= before:  # or a sum of versions would not tell
                return False
        del module._parameters["watched"]
    return True


def _with_length(table: dict[Any, Any]) -> int:
    """Python 3.12 keeps silent where an empty dict is filled at once from another one: its length tells."""
    assert dict_version is not None
    return (dict_version(table) << _ROOM) + len(table)


def trusted() -> _Version | None:
    """The version that tells every write here, alone or with the dict's length; None where neither does, as on Python 3.13.

    The two agree on all that may be asked of them: versions of one dict are compared, or added up over the same dicts.
    """
    return next(
        (v for v in (dict_version, _with_length) if dict_version is not None and v is not None and tells(v)), None
    )


_ROOM = 48  # bits for lengths
VERSION = trusted()
BY_LENGTH = VERSION is _with_length


def stamp(dicts: Collection[dict[Any, Any]]) -> int:
    """One number for many dicts, which is another one once one of them was written; 0 where there are no versions.

    A version only grows. Where a filled dict keeps its version its length grows, and versions are weighed more than all lengths.
    """
    if dict_version is None or VERSION is None:
        return 0
    found = sum(map(dict_version, dicts))
    return (found << _ROOM) + sum(map(len, dicts)) if BY_LENGTH else found
