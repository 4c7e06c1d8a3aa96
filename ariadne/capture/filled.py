"""Filled: what forward makes of the model's tensors at its first call, and keeps.

A plan makes such a thing anew in each call, and gives the same as long as these tensors are as they were: a guard sees to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ariadne import tree
from ariadne.capture.values import Values
from ariadne.guards import Effects, Origin, Place, Recording, is_array
from ariadne.plan import Groups, TracePlan

# By place and key: the tensors that stand there, by their names in the plan, and whether numbers do, too.
Slots = Mapping[tuple[Place, Any], tuple[tuple[str, ...], bool]]


def filled(found: Recording, values: Values) -> Slots:
    """What a first call left in attributes and containers."""
    return {at: _held(value, values) for at, value in _left(found)}


def _left(found: Recording) -> Iterator[tuple[tuple[Place, Any], Any]]:
    for path, name, _, now in found.changed:
        yield (Place("held", path, ()), name), now
    for place, change in found.effects.items():
        for key in () if change.kind == "set" else change.put():
            yield (place, key), change.after[key]


def _held(value: Any, values: Values) -> tuple[tuple[str, ...], bool]:
    leaves = [*tree.leaves(value)]
    ids = (values.ids.get(id(t)) for t in leaves if isinstance(t, torch.Tensor))
    numbers = any(isinstance(leaf, float) or is_array(leaf) for leaf in leaves)
    return tuple(name for name in ids if name is not None), numbers


def made_of(slots: Slots, plan: TracePlan, effects: Effects) -> dict[str, frozenset[Origin]]:
    """What was made of which tensors of the model, in words; without what the plan itself puts there at each call.

    A number is taken to be made of all that Python read numbers of.
    """
    stored = {(s.path, s.name) for s in plan.stores}
    groups, state = Groups(plan), [v for v in plan.values.values() if v.is_state]
    of: dict[str, set[str]] = {}  # by all values that may share memory: the state that was read for them
    for v in state:
        of.setdefault(groups.find(v.name), set()).add(v.name)
    for node in plan.nodes:
        read = {name for r in node.reads if r in groups.parent for name in of.get(groups.find(r), ())}
        for name in (*node.outputs, *node.writes):
            of.setdefault(groups.find(name), set()).update(read)
    asked = [name for node in plan.nodes if node.is_witness for name in node.reads]
    found: dict[str, frozenset[Origin]] = {}
    for (place, key), (tensors, numbers) in slots.items():
        names = [*tensors, *(asked if numbers else ())]
        at_each_call = place in effects.rules or (place.path, key) in stored or (place.path, key) in effects.assigned
        values = [] if at_each_call else [plan.values[n] for n in names if n in groups.parent]
        sources = {
            (*plan.values[name].origin, v.name in tensors and v.storage >= 0 and v.storage == plan.values[name].storage)
            for v in values
            for name in of.get(groups.find(v.name), ())
        }
        if sources:
            found[place.words(key)] = frozenset(sources)
    return found
