"""Begun: state that forward begins at its first call, and goes on with: a counter, a running mean, a list of what came before.

Before the first call nothing stands there, so nothing is read and changed in it, as a state that `__init__` begins is. In the state
that the first call left it shows: there a call reads what the one before left, and changes it. What a later call finds and leaves
as it is, as tables of positions and anchors, is a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture.carried import memory_of, overwrites, sides
from ariadne.capture.example import Example
from ariadne.capture.filled import held_tensors
from ariadne.capture.generators import Names
from ariadne.capture.history import alike
from ariadne.capture.reach import Reach
from ariadne.capture.recorded import recording
from ariadne.capture.state import Snapshot
from ariadne.capture.unheard import refuse_unheard
from ariadne.errors import UnsupportedError, named
from ariadne.guards import MISSING, Recording, is_a, simple
from ariadne.plan import Groups, TracePlan

Key = tuple[str, str]  # a module's path, and the name of an attribute


def begun(found: Recording) -> dict[Key, Any]:
    """What a first call put where forward had looked for an attribute in vain, or had found None."""
    read, missing = found.read_attributes, found.missing
    return {
        (path, name): copy.deepcopy(now) if simple(now) else now
        for path, name, before, now in found.changed
        if now is not None and before is None and ((path, name) in missing or (path, name) in read)
    }


def beginnings(found: Recording, plan: TracePlan) -> dict[Key, Any]:
    """What stood before where a first call began something, None or `MISSING`, if it set tensors that stood before, too."""
    replaced = any(is_a(before, torch.Tensor) and is_a(now, torch.Tensor) for _, _, before, now in found.changed)
    stores = any(store.table == "_buffers" for store in plan.stores)
    sets = replaced or stores or _writes_state(plan)
    return {key: MISSING if key in found.missing else None for key in begun(found)} if sets else {}


def _writes_state(plan: TracePlan) -> bool:
    written = [name for node in plan.nodes for name in node.writes]
    if not written:
        return False
    groups = Groups(plan)
    state = {groups.find(name) for name, value in plan.values.items() if value.is_state}
    return any(groups.find(name) in state for name in written)


def refuse_begun(modules: Mapping[str, nn.Module], first: Mapping[Key, Any]) -> None:
    """Raise `UnsupportedError` where a plain value is another after a further call on the first one's inputs."""
    for (path, name), was in first.items():
        now = modules[path].__dict__.get(name) if path in modules else was
        if simple(was) and not (simple(now) and tree.identical(was, now)):
            raise _goes_on(path, name, f"{was!r}", f"{now!r}")


def refuse_gone_on(
    model: nn.Module, example: Example, batch: int, grad: bool, drew: Names, first: Snapshot, left: Mapping[Key, Any],
    refuse: Callable[[Recording, Snapshot], object],
) -> None:  # fmt: skip
    """Raise `UnsupportedError` where a call in the state that earlier ones left goes on with what the first one `left`.

    `refuse`: what is refused of a first call's recording, too. The snapshot `first` puts the model back.
    """
    first.again(drew)
    args, kwargs = tree.unflatten(example.resized(batch), example.spec)
    snapshot = Reach(model).snapshot(args, kwargs)
    snapshot.save_buffers()
    try:
        stood = {key: held_tensors(_standing(snapshot.modules, key)) for key in left}
        with torch.set_grad_enabled(grad), recording(model, None, snapshot) as (again, _):
            model(*args, **kwargs)
        refuse(again, snapshot)
        refuse_unheard(snapshot)
        read, written = _of_before(again)
        for path, name, before, now in again.changed:
            if (path, name) not in again.read_attributes or alike(before, now):
                continue
            if not _is_replaced(before, now) or any(memory_of(t) in read for t in held_tensors(before)):
                raise _goes_on(path, name, _kind(before), _kind(now))
        for (path, name), tensors in stood.items():
            if any(memory_of(t) in read & written for t in tensors):
                raise UnsupportedError(
                    f"forward sets up {name!r} of {named(path)} when it first runs, and later reads and writes in place what "
                    "stands there, where a plan would set it up anew. Run the model once, model(*example_inputs), and prepare "
                    "then; or keep such state in a buffer"
                )
        again.forget_tensors()
    finally:
        snapshot.restore(drew)


def _of_before(run: Recording) -> tuple[set[Any], set[Any]]:
    """The memory of which a run reads what stood in it before, and that which it writes."""
    read, written, filled = set[Any](), set[Any](), set[Any]()
    for event in run.events:
        reads, writes = sides(event)
        read |= {memory_of(t) for t in reads} - filled
        written |= {memory_of(t) for t in writes}
        if overwrites(event):
            filled |= {memory_of(t) for t in writes}
    return read, written


def _is_replaced(before: Any, now: Any) -> bool:
    """Whether tensors stand in place of others, and all that Python sees of them is the same."""
    (was, spec), (found, other) = tree.flatten(before), tree.flatten(now)
    pairs = zip(was, found, strict=False)
    return spec == other and all(
        (one.dtype, one.shape) == (two.dtype, two.shape)
        if is_a(one, torch.Tensor) and is_a(two, torch.Tensor)
        else alike(one, two)
        for one, two in pairs
    )


def is_looked_into(left: Mapping[Key, Any], found: Recording, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a first call left what a further one may go on with inside: a tensor, an object, a module."""
    parts = (name in modules[path]._modules for path, name in found.missing if path in modules)
    return any(not simple(value) for value in left.values()) or any(parts)


def refuse_registered(found: Recording, snapshot: Snapshot) -> None:
    """Raise `UnsupportedError` for a buffer that forward registers since it found none of that name: the next call finds it."""
    for path, name in snapshot.new_buffers():
        if (path, name) in found.missing or path in found.tabled:
            raise UnsupportedError(
                f"forward registers the buffer {name!r} of {named(path)} where it finds none, which no plan does; register it in "
                "__init__, keep it in a plain attribute, or run the model once, model(*example_inputs), and prepare then"
            )


def _standing(modules: Mapping[str, nn.Module], key: Key) -> Any:
    return modules[key[0]].__dict__.get(key[1]) if key[0] in modules else None


def _kind(value: Any) -> str:
    return (
        repr(value)
        if simple(value)
        else f"one {type(value).__name__}"
        if is_a(value, torch.Tensor)
        else type(value).__name__
    )


def _goes_on(path: str, name: str, was: str, now: str) -> UnsupportedError:
    return UnsupportedError(
        f"forward begins the attribute {name!r} of {named(path)} at its first call, and reads and changes it at later ones (from "
        f"{was} to {now}), which a plan can't follow; keep such state in a buffer that __init__ registers"
    )
