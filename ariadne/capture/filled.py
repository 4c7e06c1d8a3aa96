"""Filled: what forward makes of the model's tensors at its first call, and keeps.

A plan makes such a thing anew in each call, and gives the same as long as these tensors are as they were: a guard sees to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ariadne import tree
from ariadne.capture.state import Snapshot
from ariadne.capture.values import Values
from ariadne.guards import MISSING, Effects, Left, MadeOf, Place, Recording, Spot, is_array, results_of, told_of
from ariadne.plan import WHOLE, Groups, TraceNode, TracePlan, uses

_RESULTS = "cell_contents"  # which no words name


class Filling(NamedTuple):
    """What stands in one place after a first call: tensors, by their names in the plan; numbers; whether an array does."""

    tensors: tuple[str, ...]
    numbers: tuple[float, ...]
    arrays: bool
    plain: Any
    spot: Spot


Slots = Mapping[tuple[Place, Any], Filling]


def filled(found: Recording, values: Values, snapshot: Snapshot) -> Slots:
    """What a first call left in attributes and containers, and in functions that keep their results."""
    return {at: _held(value, values, spot) for at, value, spot in (*_left(found), *_remembered(snapshot))}


def _left(found: Recording) -> Iterator[tuple[tuple[Place, Any], Any, Spot]]:
    for path, name, _, now in found.changed:
        yield (Place("held", path, ()), name), now, Spot(path, (name,))
    for place, change in found.effects.items():
        for key in () if change.kind == "set" else change.put():
            spot = Spot(place.path, (*place.steps, key)) if place.table == "held" else Spot()
            yield (place, key), change.after[key], spot


def _remembered(snapshot: Snapshot) -> Iterator[tuple[tuple[Place, Any], Any, Spot]]:
    for memory in snapshot.filled_memories():
        place = Place("outside", f"what {getattr(memory, '__qualname__', memory)} remembers", ())
        yield (place, _RESULTS), results_of(memory), Spot(memory=memory)


def _held(value: Any, values: Values, spot: Spot) -> Filling:
    leaves = [*tree.leaves(value)]
    ids = (values.ids.get(id(t)) for t in leaves if isinstance(t, torch.Tensor))
    numbers = tuple(leaf for leaf in leaves if type(leaf) is float)
    plain = MISSING if spot.memory is not None else told_of(value)
    return Filling(tuple(name for name in ids if name is not None), numbers, any(map(is_array, leaves)), plain, spot)


def left_by(slots: Slots, plan: TracePlan, found: Recording, effects: Effects) -> dict[str, Left]:
    """What is plain of that, where forward may read it and a later call does not put it there anew, in words.

    Not where Python reads numbers out of tensors: which call is the first of such a plan shows only after its guards.
    """
    if any(node.is_witness for node in plan.nodes):
        return {}
    read = {
        (path, name) for path, name in (*found.read_attributes, *found.missing)
    }  # `hasattr`, or an AttributeError, asks too
    read -= effects.assigned | effects.settled | effects.kept
    stored = {(s.path, s.name) for s in plan.stores}
    return {
        place.words(key): Left(had.spot, had.plain, plan.traced_batch)
        for (place, key), had in slots.items()
        if had.plain is not MISSING and had.plain is not None and had.spot.steps and place not in effects.rules
        and (had.spot.path, had.spot.steps[0]) in read - stored
    }  # fmt: skip


def made_of(slots: Slots, plan: TracePlan, effects: Effects) -> dict[str, MadeOf]:
    """What was made of which tensors of the model, in words; without what the plan itself puts there at each call.

    A number is made of what Python read that very number of; an array of all of which Python took the data.
    """
    if not slots:  # as of most models
        return {}
    stored = {(s.path, s.name) for s in plan.stores}
    groups, state = Groups(plan), [v for v in plan.values.values() if v.is_state]
    of: dict[str, set[str]] = {}  # by all values that may share memory: the state that was read for them
    for v in state:
        of.setdefault(groups.find(v.name), set()).add(v.name)
    for node in plan.nodes:
        read = {name for r in _data_of(node) if r in groups.parent for name in of.get(groups.find(r), ())}
        for name in (*node.outputs, *node.writes):
            of.setdefault(groups.find(name), set()).update(read)
    asked = [node for node in plan.nodes if node.is_witness]
    found: dict[str, MadeOf] = {}
    for (place, key), (tensors, numbers, arrays, _, spot) in slots.items():
        read_of = (node for node in asked if (arrays and node.target == WHOLE) or _is_one_of(node.witness, numbers))
        names = [*tensors, *(name for node in read_of for name in node.reads)]
        at_each_call = place in effects.rules or (place.path, key) in stored or (place.path, key) in effects.assigned
        values = [] if at_each_call else [plan.values[n] for n in names if n in groups.parent]
        sources = {
            (*plan.values[name].origin, v.name in tensors and v.storage >= 0 and v.storage == plan.values[name].storage)
            for v in values
            for name in of.get(groups.find(v.name), ())
        }
        if sources:
            found[place.words(key)] = MadeOf(frozenset(sources), spot)
    return found


_LIKE_SECOND = {
    "aten.type_as.default",
    "aten.view_as.default",
    "aten.reshape_as.default",
    "aten.expand_as.default",
    "aten.to.other",
}


def _data_of(node: TraceNode) -> Iterable[str]:
    """The values whose data an op reads; `zeros_like(x)`, `x.new_zeros(2)` and `y.type_as(x)` look at the form of `x` alone."""
    space, _, op = node.target.partition(".")
    name = op.partition(".")[0]
    if node.target in _LIKE_SECOND:
        return uses(node.args[:1])
    if space == "aten" and (name.endswith("_like") or name.startswith("new_")):
        return uses((node.args[1:], tuple(v for _, v in node.kwargs)))
    return node.reads


def _is_one_of(found: Any, numbers: tuple[float, ...]) -> bool:
    return type(found) is float and found in numbers
