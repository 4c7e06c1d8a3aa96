"""Filled: what forward makes of the model's tensors at its first call, and keeps.

A plan makes such a thing anew in each call, and gives the same as long as these tensors are as they were: a guard sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ariadne import tree
from ariadne.capture.made import Structure, maker, structure_of
from ariadne.capture.state import Snapshot
from ariadne.capture.values import Values
from ariadne.capture.written import read_by
from ariadne.guards import (
    Change,
    Effects,
    Elsewhere,
    Left,
    MadeOf,
    Place,
    Recording,
    Site,
    Spot,
    held,
    is_a,
    is_array,
    is_opaque,
    told_entries,
    told_of,
    without_content,
)
from ariadne.plan import WHOLE, Groups, TraceNode, TracePlan, uses

Entries = list[tuple[Any, Any]]
_RESULTS = "cell_contents"  # which no words name
_MOST = 4096  # so many objects are looked into


class Filling(NamedTuple):
    """What stands in one place after a first call: tensors, by their names in the plan; numbers; whether any plain value does, or
    an array; and where it consists of tensors alone, how."""

    tensors: tuple[str, ...]
    numbers: tuple[float, ...]
    plain: bool
    arrays: bool
    spot: Spot
    structure: Structure | None


class Telling(NamedTuple):
    """What a first call left in one place: at these keys of it, told as plain values, and what stood there before."""

    place: Place
    keys: tuple[Any, ...]
    value: Any
    before: Any


class Slots(NamedTuple):
    """What a first call filled, one by one; and the places, as guards tell of them."""

    fillings: Mapping[tuple[Place, Any], Filling]
    sites: Mapping[Site, Telling]


def filled(found: Recording, values: Values, snapshot: Snapshot) -> Slots:
    """What a first call left in attributes and containers, and in functions that keep their results."""
    memories = [*snapshot.memories.new()]
    slots = (
        *_left(found),
        *((at, [result for _, result in new], Spot(memory=memory)) for at, memory, new in _remembered(memories)),
    )
    sites = {
        Site(path, (name,)): Telling(Place("held", path, ()), (name,), told_of(now), told_of(before))
        for path, name, before, now in found.changed
        if now is not None
    }
    for place, change in found.effects.items():
        before, after = told_entries(change.before), told_entries(change.after)
        keys = () if change.kind == "set" else tuple(change.put())
        put = {key: value for key, value in after.items() if before.get(key, Site) != value}
        site = _site(place, change)
        if put and place.table != "input":
            sites[site] = Telling(place, keys, put, before)
    for (place, key), memory, new in _remembered(memories):
        if put := {told_of(asked): told_of(result) for asked, result in new}:
            sites[Site("", (), "memory", Elsewhere(memory))] = Telling(place, (key,), put, {})
    return Slots({at: _held(value, values, spot) for at, value, spot in slots}, sites)


def _site(place: Place, change: Change) -> Site:
    return Site(place.path, place.steps, change.kind, None if place.table == "held" else Elsewhere(change.thing))


def _left(found: Recording) -> Iterator[tuple[tuple[Place, Any], Any, Spot]]:
    for path, name, _, now in found.changed:
        yield (Place("held", path, ()), name), now, Spot(path, (name,))
    for place, change in found.effects.items():
        for key in () if change.kind == "set" else change.put():
            spot = Spot(place.path, (*place.steps, key)) if place.table == "held" else Spot()
            yield (place, key), change.after[key], spot


def _remembered(memories: Iterable[tuple[Any, Entries]]) -> Iterator[tuple[tuple[Place, Any], Any, Entries]]:
    for memory, new in memories:
        place = Place("outside", f"what {getattr(memory, '__qualname__', memory)} remembers", ())
        yield (place, _RESULTS), memory, new


def _held(value: Any, values: Values, spot: Spot) -> Filling:
    leaves = [*tree.leaves(value)]
    ids = (values.ids.get(id(t)) for t in held_tensors(value))
    numbers = tuple(leaf for leaf in leaves if type(leaf) is float)
    tensors = tuple(name for name in ids if name is not None)
    plain = any(is_a(leaf, (int, float, complex, str)) for leaf in leaves)
    return Filling(tensors, numbers, plain, any(map(is_array, leaves)), spot, structure_of(value, values.ids))


def held_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, those in objects too, as far as names lead."""
    found: dict[int, torch.Tensor] = {}
    todo, seen = [*tree.leaves(value)], set[int]()
    while todo and len(seen) < _MOST:
        one = todo.pop()
        if is_a(one, torch.Tensor):
            found[id(one)] = one
        elif id(one) not in seen and not is_opaque(one):
            seen.add(id(one))
            todo += [inner for _, thing in held(one) for inner in tree.leaves(thing)]
    return [*found.values()]


def reads_of(plan: TracePlan, found: Recording, effects: Effects) -> frozenset[tuple[str, str]]:
    """The attributes of modules that forward reads, or asks for by `hasattr`, and that no call puts there anew.

    Of those, what a first call left there decides what the next ones do. None where Python reads numbers out of tensors: which call
    is the first of such a plan shows only after its guards.
    """
    if any(node.is_witness for node in plan.nodes):
        return frozenset()
    read = {(path, name) for path, name in (*found.read_attributes, *found.missing)}
    stored = {(s.path, s.name) for s in plan.stores}
    return frozenset(read - effects.assigned - effects.settled - effects.kept - stored)


def left_by(slots: Slots, plan: TracePlan, reads: frozenset[tuple[str, str]], effects: Effects) -> dict[Site, Left]:
    """What a first call left where forward may read it, and a later call does not put it there anew."""
    if any(node.is_witness for node in plan.nodes):
        return {}
    found, follows = {}, _following(slots, plan)
    for site, (place, keys, value, before) in slots.sites.items():
        if place in effects.rules or not (site.elsewhere or (site.path, site.steps[0]) in reads):
            continue
        value = without_content(value) if any((place, key) in follows for key in keys) else value
        where = place.words(keys[0]) if len(keys) == 1 else place.words()
        found[site] = Left(where, value, before, plan.traced_batch)
    return found


def counted(left: Mapping[Site, Left], changes: Mapping[Place, Change], same: Callable[[], bool]) -> dict[Site, Left]:
    """The same, told of which dicts and sets a result follows by what else is in them: whether there is any, or how much.

    Keys that differ in numbers are taken for those of a cache, which holds something for each. So one of another number is put
    there, as another first call would, with something else behind it, and forward has to give the `same`.
    """
    found = dict(left)
    for place, change in changes.items():
        site = _site(place, change)
        if site not in left or type(change.thing) not in (dict, set):
            continue
        mine = change.after.keys() - change.before.keys() if change.kind == "dict" else change.after - change.before
        others = {another: key for key in mine if (another := _of_another_number(key)) not in change.after}
        if not others:
            continue
        now, thing = change.thing.copy(), change.thing
        try:
            thing.clear()
            thing.update(change.before)
            thing.update(
                {k: _altered(change.after[key]) for k, key in others.items()} if type(thing) is dict else others
            )
            if not same():
                found[site] = left[site]._replace(counted=True)
        finally:
            thing.clear()
            thing.update(now)
    return found


def _of_another_number(key: Any) -> Any:
    if type(key) in (int, float):
        return key + 1
    return tuple(map(_of_another_number, key)) if type(key) is tuple else key


def _altered(value: Any) -> Any:
    def altered(leaf: Any) -> Any:
        if is_a(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.detach() + 1
        return leaf + 1 if type(leaf) in (int, float) else leaf

    return tree.map_leaves(altered, value)


def _following(slots: Slots, plan: TracePlan) -> set[tuple[Place, Any]]:
    """Where something stands that was made of the model's tensors or of the inputs, or of numbers that were drawn."""
    of = [v.name for v in plan.values.values() if v.is_state or v.kind == "input"]
    return _made_of(slots, plan, of, drew=True) | {at for at, had in slots.fillings.items() if had.arrays}


def made_of_inputs(slots: Slots, plan: TracePlan, effects: Effects, drew: bool) -> dict[tuple[Place, Any], Filling]:
    """Where something stands that was made of what is in the inputs, or that was drawn, and that no later call puts there anew.

    What was made of the sizes of inputs alone is not among it.
    """
    stored = {(s.path, s.name) for s in plan.stores}

    def at_each_call(place: Place, key: Any) -> bool:
        rule = effects.rules.get(place)
        again = rule is not None and (rule.how != "items" or key in (*rule.what, *rule.grown))
        return again or (place.path, key) in stored or (place.path, key) in effects.assigned

    inputs = [v.name for v in plan.values.values() if v.kind == "input"]
    found = _made_of(slots, plan, inputs, drew)
    return {at: had for at, had in slots.fillings.items() if at in found and not at_each_call(*at)}


def _made_of(slots: Slots, plan: TracePlan, sources: Iterable[str], drew: bool) -> set[tuple[Place, Any]]:
    """Where a tensor stands that was made of what is in these values, or of numbers that were drawn."""
    if not any(had.tensors for had in slots.fillings.values()):  # as of most models
        return set()
    groups = Groups(plan)
    of = {groups.find(name) for name in sources if name in groups.parent}
    for node in plan.nodes:
        if (node.seeded and drew) or any(r in groups.parent and groups.find(r) in of for r in _data_of(node)):
            of.update(groups.find(name) for name in (*node.outputs, *node.writes))
    return {
        at
        for at, had in slots.fillings.items()
        if any(name in groups.parent and groups.find(name) in of for name in had.tensors)
    }


def made_of(slots: Slots, plan: TracePlan, effects: Effects) -> dict[str, MadeOf]:
    """What was made of which tensors of the model, in words; without what forward itself puts there at each call, as the plan does.

    A number is made of what Python read that very number of; an array of all of which Python took the data; and what else is plain
    of all that Python read in the first run and did not in a second. How it is made is said where all that the call leaves can be
    made of the model's tensors alone.
    """
    if not slots.fillings:  # as of most models
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
    once = [node for node in asked if read_by(node.target) in effects.read_once]
    of_once = _of_numbers(slots, plan) if once else set()
    kept_for_size, holders = effects.kept_for_size, _telling(slots, effects)
    found: dict[str, MadeOf] = {}
    all_made, left = True, set[str]()
    for (place, key), (tensors, numbers, _plain, arrays, spot, structure) in slots.fillings.items():
        read_of = [node for node in asked if (arrays and node.target == WHOLE) or _is_one_of(node.witness, numbers)]
        if (place, key) in of_once:
            read_of += once
        names = [*tensors, *(name for node in read_of for name in node.reads)]
        at_each_call = place in effects.rules or (place.path, key) in stored or (place.path, key) in effects.assigned
        if at_each_call and (effects.puts_again(place, key) or not kept_for_size):
            continue
        names = [*tensors] if at_each_call else names  # a number that each call puts there anew may be the same
        values = [plan.values[n] for n in names if n in groups.parent]
        sources = {
            (*plan.values[name].origin, v.name in tensors and v.storage >= 0 and v.storage == plan.values[name].storage)
            for v in values
            for name in of.get(groups.find(v.name), ())
        }
        graph = any(plan.values[name].requires_grad for name in tensors)
        if at_each_call and sources:
            found[place.words(key)] = MadeOf(frozenset(sources), spot, holders=holders, graph=graph)
        if at_each_call:
            continue
        make = maker(plan, structure) if spot.steps else None
        memory = [groups.find(name) for name in tensors if name in groups.parent]
        all_made &= bool(sources) and make is not None and len({*memory}) == len(memory) and left.isdisjoint(memory)
        left.update(memory)  # what stands in two places, or shares memory, would be left as two things
        if sources:
            found[place.words(key)] = MadeOf(frozenset(sources), spot, make, graph=graph)
    return found if all_made else {what: replace(made, make=None) for what, made in found.items()}


def _of_numbers(slots: Slots, plan: TracePlan) -> set[tuple[Place, Any]]:
    """Where something stands that Python may have made of numbers that it read; if nothing plain does, any tensor may be one."""
    constants = (v.name for v in plan.values.values() if v.kind == "constant")
    found = {at for at, had in slots.fillings.items() if had.plain or had.arrays}
    return found | _made_of(slots, plan, constants, drew=False) or {*slots.fillings}


def _telling(slots: Slots, effects: Effects) -> frozenset[tuple[str, str]]:
    """The attributes that hold the batch for which forward keeps things; none where something else may tell of it, too."""
    rules, assigned = effects.again
    beside = ((Place("held", path, ()), name) for path, name in effects.assigned - assigned - effects.holders)
    tensors = all((had := slots.fillings.get(at)) is not None and had.structure for at in beside)
    return frozenset(effects.holders) if tensors and effects.rules == rules else frozenset()


EVERY_ARGUMENT = slice(None)
_LIKE_SECOND = {
    "aten.type_as.default",
    "aten.view_as.default",
    "aten.reshape_as.default",
    "aten.expand_as.default",
    "aten.to.other",
}


def _data_of(node: TraceNode) -> Iterable[str]:
    """The values whose data an op reads."""
    at = data_at(node.target)
    if at == EVERY_ARGUMENT:
        return node.reads
    return uses((node.args[at], tuple(v for _, v in node.kwargs) if at.start else ()))


def data_at(target: str) -> slice:
    """At which arguments of an op, by its name in a plan, the data of tensors are read.

    `zeros_like(x)`, `x.new_zeros(2)` and `y.type_as(x)` look at the form of `x` alone.
    """
    space, _, op = target.partition(".")
    name = op.partition(".")[0]
    if target in _LIKE_SECOND:
        return slice(0, 1)
    if space == "aten" and (name.endswith("_like") or name.startswith("new_")):
        return slice(1, None)
    return slice(0, 0) if target == "aten.sym_size.int" else EVERY_ARGUMENT


def _is_one_of(found: Any, numbers: tuple[float, ...]) -> bool:
    return type(found) is float and found in numbers
