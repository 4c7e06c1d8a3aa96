"""Copied: the objects of a plan for a deep copy of its model.

A plan holds things that are no tensors: modules, methods and functions that it calls whole, generators, containers. Where the
model is copied, what belongs to it is its copy's; what stands outside of it is shared, as by `copy.deepcopy` itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.capture.call import Call
from ariadne.errors import ModuleError
from ariadne.guards import is_a
from ariadne.plan import TracePlan

_MOST = 4096  # so many things are looked at for one that belongs to the model


def copied_plan(plan: TracePlan, model: nn.Module, memo: Mapping[int, Any]) -> TracePlan:
    """The plan of `model` for the copies in `memo`, which is that of `copy.deepcopy`; the same one where nothing belongs to them.

    A function of forward's whose closure or defaults hold the model gets those of the copy. `ModuleError` for one that reaches
    the model in another way: it would run the original's modules, and read the original's weights. A function that stands on
    the model is shared, as the copied model shares it.
    """
    held = (value for module in model.modules() for value in vars(module).values())
    shared = [f for value in held for f in (value, *_items(value)) if type(f) is FunctionType]
    copies = _Copies(memo, {id(f): f for f in shared})
    objects = {name: copies.of(thing) for name, thing in plan.objects.items()}
    if all(objects[name] is thing for name, thing in plan.objects.items()):
        return plan
    return replace(plan, objects=objects)


class _Copies:
    """What things are for the copies in a memo, each made once."""

    def __init__(self, memo: Mapping[int, Any], made: dict[int, Any]) -> None:
        self.memo, self.made = memo, made
        kept = memo.get(id(memo), ())  # there `copy.deepcopy` keeps what it copied
        # Torch wraps a generator anew for an op, so the plan's object is another than the model's.
        self.generators = {x._cdata: memo[id(x)] for x in kept if is_a(x, torch.Generator) and id(x) in memo}

    def of(self, thing: Any) -> Any:
        """The thing that stands for this one."""
        if id(thing) in self.memo:
            return self.memo[id(thing)]
        if is_a(thing, torch.Generator):
            return self.generators.get(thing._cdata, thing)
        if id(thing) not in self.made:
            self.made[id(thing)] = self._made(thing) if self._reaches(thing) else thing
        return self.made[id(thing)]

    def _made(self, thing: Any) -> Any:
        if isinstance(thing, Call):
            return replace(thing, function=self.of(thing.function))
        if type(thing) is MethodType:
            return MethodType(self.of(thing.__func__), self.of(thing.__self__))
        if type(thing) is partial:
            keywords = {k: self.of(v) for k, v in thing.keywords.items()}
            return partial(self.of(thing.func), *map(self.of, thing.args), **keywords)
        if type(thing) is FunctionType and not thing.__dict__:
            return self._function(thing)
        raise ModuleError(
            f"the plan holds {thing!r}, which forward hands to a part that is kept whole, and which reaches the model: in a deep "
            "copy it would run the original's modules. Prepare the copy of the model: prepare_split(copy.deepcopy(model), ...)"
        )

    def _function(self, thing: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in thing.__closure__ or ())
        found = FunctionType(thing.__code__, thing.__globals__, thing.__name__, None, cells)
        found.__qualname__ = thing.__qualname__
        self.made[id(thing)] = found  # it may hold itself
        if thing.__defaults__:
            found.__defaults__ = tuple(map(self.of, thing.__defaults__))
        if thing.__kwdefaults__:
            found.__kwdefaults__ = {k: self.of(v) for k, v in thing.__kwdefaults__.items()}
        for mine, its in zip(cells, thing.__closure__ or (), strict=True):
            for held in gc.get_referents(its):  # none where the cell is empty
                mine.cell_contents = self.of(held)
        return found

    def _reaches(self, thing: Any) -> bool:
        """Whether something that was copied can be reached from here; true where that takes too long to tell."""
        seen, at = {id(thing)}, [thing]
        while at:
            for found in _held_by(at.pop()):
                if id(found) in self.memo or len(seen) > _MOST:
                    return True
                if id(found) not in seen:
                    seen.add(id(found))
                    at.append(found)
        return False


def _items(value: Any) -> Iterable[Any]:
    """What a container holds, itself; none where it is no container."""
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _held_by(thing: Any) -> Iterator[Any]:
    """What a thing holds; of a function, not what it finds in its module."""
    if isinstance(thing, type | ModuleType | CodeType):
        return
    skipped = thing.__globals__ if type(thing) is FunctionType else None
    yield from (found for found in gc.get_referents(thing) if found is not skipped)
    if isinstance(thing, dict):  # from Python 3.13 on that of an object tells the collector of nothing in it
        yield from dict.values(thing)


__all__ = ["copied_plan"]
