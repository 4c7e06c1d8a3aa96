"""Carried: what forward made of a call's inputs and keeps, and what later calls give that follows it.

Such a call goes on with what an earlier one was given, where a plan would make the thing anew of its own inputs. Whether it does is
read off the ops of one more run: values may be alike by chance, as the largest channels of two inputs are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from ariadne import tree
from ariadne.capture.example import Example
from ariadne.capture.filled import Filling, data_at, held_tensors
from ariadne.capture.generators import Names
from ariadne.capture.history import gives
from ariadne.capture.recorded import recording
from ariadne.capture.state import Snapshot
from ariadne.guards import MISSING, Attribute, Change, Event, Place, Recording, held, is_a, variables
from ariadne.plan import storage_of, tensors_in, written_arguments

_OVERWRITES = frozenset({"copy_", "zero_", "fill_"})  # and read nothing of what they write


def carried(
    model: nn.Module, example: Example, batch: int, grad: bool, drew: Names, snapshot: Snapshot,
    kept: Mapping[tuple[Place, Any], Filling], changes: Mapping[Place, Change],
) -> tuple[str, ...]:  # fmt: skip
    """Those of the `kept` things, in words, that a later call's results follow; `changes`: what the first call did to containers.

    The model has been called before, and the snapshot puts it back.
    """
    if not kept:
        return ()
    snapshot.again(drew)
    gives(model, example, batch, grad, (), snapshot)
    at = {
        memory_of(t): place.words(*_step(key))
        for (place, key), had in kept.items()
        for t in held_tensors(_standing(model, snapshot, place, key, had, changes))
    }
    at = {key: words for key, words in at.items() if key not in snapshot.storages()}
    if not at:
        return ()
    for given in (example.turned(), example):
        snapshot.again(drew)
        leaves = given.resized(batch)
        args, kwargs = tree.unflatten(leaves, example.spec)
        try:
            with torch.set_grad_enabled(grad), recording(model, None, snapshot) as (again, _):
                again.output = model(*args, **kwargs)
        except Exception:  # of numbers that nobody asked it to take
            continue
        found = _Followed(at, leaves, snapshot.storages()).through(again)
        again.forget_tensors()
        again.output = None
        return found
    return tuple(dict.fromkeys(at.values()))


def _step(key: Any) -> tuple[Any, ...]:
    return () if key == "cell_contents" else (key,)


def _standing(
    model: nn.Module, snapshot: Snapshot, place: Place, key: Any, had: Filling, changes: Mapping[Place, Change]
) -> Any:
    """What stands now where a first call put something."""
    if had.spot.memory is not None:
        return [new for memory, new in snapshot.memories.new() if memory is had.spot.memory]
    if had.spot.steps:
        return had.spot.now(model)
    change = changes[place]
    attribute = change.kind == "object"
    if hasattr(change.thing, "names"):
        return variables(change.thing.thing, change.thing.names).get(key, MISSING)
    return next((v for step, v in held(change.thing) if step == key and is_a(step, Attribute) is attribute), MISSING)


def memory_of(t: torch.Tensor) -> Any:
    """What tells the memory of a tensor, or the tensor, where it has none of its own."""
    key = storage_of(t)
    return ("sparse", id(t)) if key is None else key


class _Followed:
    """What follows, in one run, kept things, told by memory, and what follows this run's own inputs."""

    def __init__(self, kept: Mapping[Any, str], inputs: Sequence[Any], state: set[int]) -> None:
        self.kept = {key: (words,) for key, words in kept.items()}
        self.inputs = [t for t in inputs if is_a(t, torch.Tensor)]
        self.own = {*map(memory_of, self.inputs)}
        self.state = state

    def through(self, run: Recording) -> tuple[str, ...]:
        """The kept things that what the run gives, leaves or asks follows.

        A question that it asks of one of them and of its own inputs, as whether they are equal, tells which of both is used, and
        does not count.
        """
        found = [words for event in run.events for words in self._op(event)]
        assigned = [now for path, name, _, now in run.changed if (path, name) in run.written]
        left = (run.output, assigned, [t for _, _, t in run.stores], self.inputs)
        found += [words for t in held_tensors(left) for words in self.kept.get(memory_of(t), ())]
        return tuple(dict.fromkeys(found))

    def _op(self, event: Event) -> tuple[str, ...]:
        """Follow one op; returns what decides something that it asks, or that it writes into the model's own."""
        read, written = sides(event)
        kept = tuple(dict.fromkeys(words for t in read for words in self.kept.get(memory_of(t), ())))
        own = any(memory_of(t) in self.own for t in read)
        made = [*tensors_in(event.out), *written]
        if not made:
            return () if own else kept
        for t in written if overwrites(event) else ():
            self.kept.pop(memory_of(t), None)
            self.own.discard(memory_of(t))
        for key in {memory_of(t) for t in made}:
            self.kept[key] = tuple(dict.fromkeys((*self.kept.get(key, ()), *kept)))
            self.own.update([key] if own else ())
        return kept if any(memory_of(t) in self.state for t in written) else ()


def sides(event: Event) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors whose data an op reads, and those that it writes."""
    target = event.target
    if not isinstance(target, OpOverload):
        written = list(event.effect.writes) if event.effect else []
        return [*tensors_in(tuple(event.args)), *event.within], written
    name = target._schema.name.split("::")[1]
    at = data_at(f"{target.namespace}.{name}.{target._overloadname}")
    places = [*written_arguments(target, event.args)]
    written = [t for i in places for t in tensors_in(event.args[i])]
    read = tensors_in(event.args[1:] if overwrites(event) else event.args[at])
    return [*read, *event.within], written


def overwrites(event: Event) -> bool:
    """Whether an op fills all of the memory that it writes."""
    if not isinstance(event.target, OpOverload) or event.target._schema.name.split("::")[1] not in _OVERWRITES:
        return False
    into: torch.Tensor = event.args[0]
    return storage_of(into) is not None and into.numel() * into.itemsize == into.untyped_storage().nbytes()
