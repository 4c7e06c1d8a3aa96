"""Referred: further references by which forward reached a tensor that the plan reads from one place of the model's.

A weight stands in a registry, and also in a list, a variable of a function around, or an argument of a partial. Where another one
takes its place in the registry, the model goes on with the old one where it reaches that by the other reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ariadne.guards.attributes import follow, held, is_a, is_opaque, place
from ariadne.guards.outside import Outside
from ariadne.plan import storage_of

_MOST, _DEEP = 4096, 8  # so many things, so many steps away, are looked at in what stands outside of the model
_HOLDING = (list, tuple, dict, deque, partial)

Home = tuple[str, str, tuple[Any, ...]]  # a module's path; the registry, or nothing for an attribute; and steps
Read = tuple[
    str, tuple[Any, ...], torch.Tensor
]  # what forward reached by an attribute: path, steps, and what stood there


class Reference(NamedTuple):
    """A place where a tensor stood that stood in `homes`, too: `steps` from the module at `path`, or from something `outside`.

    `views`: it is no such tensor itself, but shows the memory of one.
    """

    homes: tuple[Home, ...]
    path: str
    steps: tuple[Any, ...]
    outside: Outside | None = None
    views: bool = False

    def of_copy(self, memo: Mapping[int, Any]) -> Reference:
        """The same for a deep copy of the model."""
        return self if self.outside is None else self._replace(outside=self.outside.of_copy(memo))

    def table(self) -> Any:
        """What holds the last step of one outside, as it stands now; KeyError and the like where nothing does."""
        assert self.outside is not None
        if not self.steps:
            return self.outside.table
        return place(follow(self.outside.now(), self.steps[:-1]), self.steps[-1])

    def name(self) -> str:
        """What it is called, where it stands outside."""
        return self.outside.name if self.outside is not None else ""


def references(modules: Mapping[str, nn.Module], read: Iterable[Read], outside: Iterable[Outside]) -> list[Reference]:
    """All places but the homes at which forward reached a tensor that has one."""
    homes: dict[int, list[Home]] = {}
    memories: dict[int, list[Home]] = {}
    for table in ("_parameters", "_buffers"):
        for path, module in modules.items():
            for name, t in module.__dict__[table].items():
                if t is not None:
                    homes.setdefault(id(t), []).append((path, table, (name,)))
                    if (memory := storage_of(t)) is not None:
                        memories.setdefault(memory, []).append((path, table, (name,)))
    registered, read = {*homes}, list(read)
    for path, module in modules.items():
        for name, t in module.__dict__.items():
            if is_a(t, torch.Tensor) and id(t) not in registered:
                homes.setdefault(id(t), []).append((path, "", (name,)))
    for path, steps, t in read:
        if id(t) not in registered and (path, "", steps) not in homes.get(id(t), ()):
            homes.setdefault(id(t), []).append((path, "", steps))
    found = [
        Reference((*homes[id(t)],), path, steps)
        for path, steps, t in read
        if id(t) in registered or len(homes[id(t)]) > 1
    ]
    for one in outside:
        for steps, t in _tensors_in(one.value):
            if id(t) in homes:
                found.append(Reference((*homes[id(t)],), "", steps, one))
            elif (memory := storage_of(t)) in memories and memory is not None:
                found.append(Reference((*memories[memory],), "", steps, one, True))
    return found


def _tensors_in(value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in a thing, each with the steps that lead to it."""
    todo: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        steps, thing = todo.pop()
        if is_a(thing, torch.Tensor):
            yield steps, thing
        elif id(thing) not in seen and len(steps) < _DEEP and (is_a(thing, _HOLDING) or not is_opaque(thing)):
            seen.add(id(thing))
            todo += [((*steps, step), inner) for step, inner in held(thing)]
