"""Versions of dicts: numbers that grow when a dict is written, which torch's own compiler asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

dict_version = getattr(torch._C._dynamo.guards, "dict_version", None)


def tells(version: Callable[[dict[Any, Any]], int]) -> bool:
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


VERSION: Callable[[dict[Any, Any]], int] | None = (
    dict_version if dict_version is not None and tells(dict_version) else None
)
