"""Filled: what forward makes of the model's tensors at its first call, and keeps.

A plan makes such a thing anew in each call, and gives the same as long as these tensors are as they were: a guard sees to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ariadne import tree
from ariadne.capture.values import Values
from ariadne.guards import Effects, MadeOf, Place, Recording, is_array
from ariadne.plan import WHOLE, Groups, TracePlan

# By place and key: the tensors that stand there, by their names in the plan; numbers; and whether an array does.
Slots = Mapping[tuple[Place, Any], tuple[tuple[str, ...], tuple[float, ...], bool]]


def filled(found: Recording, values: Values) -> Slots:
    """What a first call left in attributes and containers."""
    return {at: _held(value, values) for at, value in _left(found)}


def _left(found: Recording) -> Iterator[tuple[tuple[Place, Any], Any]]:
    for path, name, _, now in found.changed:
        yield (Place("held", path, ()), name), now
    for place, change in found.effects.items():
        for key in () if change.kind == "set" else change.put():
            yield (place, key), change.after[key]


def _held(value: Any, values: Values) -> tuple[tuple[str, ...], tuple[float, ...], bool]:
    leaves = [*tree.leaves(value)]
    ids = (values.ids.get(id(t)) for t in leaves if isinstance(t, torch.Tensor))
    numbers = tuple(leaf for leaf in leaves if type(leaf) is float)
    return tuple(name for name in ids if name is not None), numbers, any(map(is_array, leaves))


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
        read = {name for r in node.reads if r in groups.parent for name in of.get(groups.find(r), ())}
        for name in (*node.outputs, *node.writes):
            of.setdefault(groups.find(name), set()).update(read)
    asked = [node for node in plan.nodes if node.is_witness]
    found: dict[str, MadeOf] = {}
    for (place, key), (tensors, numbers, arrays) in slots.items():
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
            mine = place.table == "held"
            attribute = str((*place.steps, key)[0]) if mine else ""
            found[place.words(key)] = MadeOf(frozenset(sources), place.path if mine else "", attribute)
    return found


def _is_one_of(found: Any, numbers: tuple[float, ...]) -> bool:
    return type(found) is float and found in numbers
