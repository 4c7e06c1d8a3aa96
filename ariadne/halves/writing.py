"""Saving: one side of a split becomes a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.cut import SIDES, Part, SplitCandidate, held_by_itself, parameters_read, parts
from ariadne.errors import FrontierError, HalfError, ModuleError, named
from ariadne.guards import Baseline, shown, sizes_count
from ariadne.halves import ops, weights
from ariadne.halves.atoms import Classes
from ariadne.halves.called import named_in, refuse_kept_by_both, told_object
from ariadne.halves.containers import make
from ariadne.halves.form import NOTHING, Side, told_side
from ariadne.halves.known import Whole
from ariadne.halves.packed import gathered, packed_in, told_packed
from ariadne.halves.parameters import told_parameters
from ariadne.halves.skeleton import Held, Place, skeleton
from ariadne.halves.whole import FORMATS, VERSION, said
from ariadne.plan import WHOLE, Apart, Groups, Store, TraceNode, TracePlan, Value, storage_of, uses

_UNNAMED = ("aten.sym_size.int", WHOLE)


@dataclass(frozen=True)
class Cut:
    """One plan of a split: its cut, the model as it was at capture, and what one side knows of the other.

    `more`: how many ops of its prefix are there for other paths, beyond those before the cut that `split_id` names.
    """

    plan: TracePlan
    candidate: SplitCandidate
    baseline: Baseline
    apart: Apart
    guarded: Mapping[str, Collection[str]]  # by side, the modules whose training flags count
    more: int = 0


@dataclass
class Slot:
    """A tensor of the half: the places where it is kept, first the one that plans read; whether it is in state dicts."""

    places: list[Place]
    tensor: torch.Tensor
    persistent: bool
    plain: set[Place] = field(default_factory=set)  # of the places, those that are plain attributes

    def held(self, at: weights.Row) -> Held:
        """What the file says of it."""
        places = tuple(("attribute", *p[1:]) if p in self.plain else p for p in self.places)
        return Held(places, self.persistent, self.tensor.requires_grad, at)


def origin_of(value: Value) -> Place:
    """Where a half keeps a tensor of the model: plain attributes become buffers that no state dict has."""
    path, key, *steps = value.origin
    if value.kind != "attribute":
        return value.kind, path, key
    plain = "_".join(str(s[1] if isinstance(s, tuple) else s) for s in (key, *steps))
    return "buffer", path, re.sub(r"\W", "_", plain)


def held(model: nn.Module, value: Value) -> torch.Tensor:
    """The tensor that the model has now for a value of its state."""
    path, key, *steps = value.origin
    module = model.get_submodule(path)
    found: Any = (
        module.__dict__[{"parameter": "_parameters", "buffer": "_buffers"}[value.kind]]
        if value.kind != "attribute"
        else module.__dict__
    )[key]
    for step in steps:
        found = getattr(found, step[1]) if isinstance(step, tuple) else found[step]
    if not isinstance(found, torch.Tensor):
        raise ModuleError(f"{shown(value.origin[1:])!r} of {path!r} is no tensor any more; prepare the split again")
    return found


def side_of(cut: Cut, name: str, model: nn.Module) -> Side:
    """The plan that holds one side of a cut alone; `FrontierError` where that side can't do without the other's state."""
    plan, candidate = cut.plan, cut.candidate
    part, other = _both(plan, candidate, name)
    _refuse_moved(plan, candidate, part, other)
    _refuse_views(plan, candidate, part, other, model)
    _refuse_filled(plan, cut.baseline, part)
    nodes = part.nodes(plan)
    for node in nodes:
        _refuse_op(node)
    _refuse_values(plan, part)
    refuse_kept_by_both(plan, {*part.reads(plan)}, {*other.reads(plan)})
    prefix = name == SIDES[0]
    stores = tuple(s for store in _left(plan, part) for s in _stores(plan, store))
    output = () if prefix else plan.output
    used = {
        n for node in nodes for n in (*node.reads, *node.outputs, *node.writes, *(a for p in node.may_alias for a in p))
    }
    used |= {*part.takes, *candidate.live, *uses(output), *(n for s in stores for n in uses(s.atoms))}
    used |= {n for name in used if name in plan.values for n in uses(plan.values[name].shape)}
    values = {n: _moved(v) for n, v in plan.values.items() if n in used}
    mine = {origin_of(plan.values[n])[1:] for n, v in values.items() if v.is_state}
    assumed = plan.assumption
    wanting = assumed.requires_grad
    if wanting is not None:
        wanting = tuple((p, on) for p, on in wanting if (p.rpartition(".")[0], p.rpartition(".")[2]) in mine)
    there = {id(p) for p in _parameters(model, plan, other)}
    own = parameters_read(plan, part)
    shared = tuple((p, k) for p, k in own if id(model.get_submodule(p)._parameters.get(k)) in there)
    missing = [n for n in plan.given if n in values]
    if missing and prefix:
        raise HalfError(
            f"an input of forward is a {type(plan.given[missing[0]].thing).__name__}, which is neither a tensor nor a plain "
            "value, and can't be kept in a file; pass tensors and numbers"
        )
    plan = replace(
        plan,
        nodes=nodes,
        values=values,
        inputs=plan.inputs if prefix else (),
        literals=plan.literals if prefix else (),
        input_spec=plan.input_spec if prefix else NOTHING,
        tied_inputs=plan.tied_inputs if prefix else (),
        output=output,
        output_spec=tree.Spec("tuple", tuple) if prefix else plan.output_spec,
        calls=(),
        stores=stores,
        constants={n: t for n, t in plan.constants.items() if n in values},
        objects={n: o for n, o in plan.objects.items() if n in values},
        given={},
        not_captured_by=(),
        excluded=(),
        assumption=replace(assumed, requires_grad=wanting, shapes=sizes_count(plan, cut.baseline), classes=None),
        apart=replace(cut.apart, part=name, first=0 if prefix else candidate.cut, shared=shared),
    )
    return Side(plan, replace(candidate, cut=candidate.cut - cut.more))


def _refuse_values(plan: TracePlan, part: Part) -> None:
    """Raise `HalfError` for what no file can hold: containers of others that forward fills, classes of inputs."""
    read = {v.origin[:2] for v in plan.values.values() if v.kind == "attribute"}
    for store in _left(plan, part):
        if store.inside and (store.table != "held" or (store.path, store.steps[0]) in read):
            raise HalfError(
                f"forward puts something into a container ({store.where}), and "
                + ("reads it, too" if store.table == "held" else "the model doesn't hold that in an attribute")
                + ", which a file can't hold; return it, or use a buffer"
            )
    if plan.assumption.classes is not None and part.start == 0:
        raise HalfError("an input is a tensor of a class of its own, which a file can't hold; pass plain tensors")


def _left(plan: TracePlan, part: Part) -> list[Store]:
    """What a half leaves behind: all that forward does there, but for what it puts on a class, which a half has not."""
    return [s for s in part.stores(plan) if not (s.table == "outside" and isinstance(plan.objects[s.path], type))]


def _both(plan: TracePlan, candidate: SplitCandidate, name: str) -> tuple[Part, Part]:
    both = parts(plan, (candidate,), SIDES)
    return both[SIDES.index(name)], both[1 - SIDES.index(name)]


def _parameters(model: nn.Module, plan: TracePlan, part: Part) -> Iterator[nn.Parameter]:
    for path, key in parameters_read(plan, part):
        found = model.get_submodule(path)._parameters.get(key)
        if found is not None:
            yield found


def _moved(value: Value) -> Value:
    """A value with its state where the half keeps it."""
    if value.kind != "attribute":
        return value
    kind, path, key = origin_of(value)
    return replace(value, kind=kind, origin=(path, key))


def _refuse_op(node: TraceNode) -> None:
    if node.target in _UNNAMED or node.target.startswith("python."):
        return
    why = ops.refusal(ops.resolve(node.target))
    if why:
        raise HalfError(
            f"forward runs {node.target} (in {node.module or 'the model itself'}), which a file may not name: {why}. "
            f"Write it in other ops"
        )


def _stores(plan: TracePlan, store: Store) -> Iterator[Store]:
    """What forward stores in an attribute: to the buffers that hold it here, where a plan reads it, or to the attribute itself."""
    if store.table == "_buffers" or store.inside:
        yield replace(store, needs=())
        return
    read = {
        v.origin: v for v in plan.values.values() if v.kind == "attribute" and v.origin[:2] == (store.path, store.name)
    }
    if not read:
        yield store
        return
    leaves = tree.unflatten([_Leaf(a) for a in store.atoms], store.spec)
    for origin, value in read.items():
        found = leaves
        for step in origin[2:]:
            found = getattr(found, step[1]) if isinstance(step, tuple) else found[step]
        if not isinstance(found, _Leaf):
            raise HalfError(
                f"forward leaves {store.name!r} on {store.path!r} in another structure than it reads; keep one structure"
            )
        _, path, key = origin_of(value)
        yield Store(path, "_buffers", key, tree.Spec(tree.LEAF), (found.atom,))


@dataclass(frozen=True)
class _Leaf:
    atom: Any


def _refuse_moved(plan: TracePlan, candidate: SplitCandidate, part: Part, other: Part) -> None:
    """Raise `FrontierError` where one side writes state that the other reads: two files would each have their own."""
    groups = Groups(plan)
    state = {groups.find(n): v for n, v in plan.values.items() if held_by_itself(v)}

    def touched(one: Part, written: bool) -> set[str]:
        names = {n for node in one.nodes(plan) for n in node.writes} | (set() if written else {*one.reads(plan)})
        return {groups.find(n) for n in names & groups.parent.keys()} & state.keys()

    def stored(one: Part) -> set[tuple[Any, ...]]:
        return {(s.path, s.name) for s in one.stores(plan)}

    def read(one: Part) -> dict[tuple[Any, ...], Value]:
        found = map(plan.values.get, one.reads(plan))
        return {v.origin[:2]: v for v in found if v is not None and v.is_state}

    for writer, reader in ((part, other), (other, part)):
        both = touched(writer, True) & touched(reader, False)
        names = [v for root, v in state.items() if root in both] + [
            v for at, v in read(reader).items() if at in stored(writer)
        ]
        if names:
            where = ".".join(str(o) for o in names[0].origin if o != "") or names[0].name
            raise FrontierError(
                f"the halves at {candidate.split_id} can't part: {where!r} is written by the {writer.name} and used by the "
                f"{reader.name}, and each file would have one of its own. Cut elsewhere, or keep both sides in one process"
            )


def _refuse_views(plan: TracePlan, candidate: SplitCandidate, part: Part, other: Part, model: nn.Module) -> None:
    """Raise `FrontierError` where a parameter shares its memory with a tensor over the cut: two files would each have a copy."""

    def state(one: Part) -> dict[int, torch.Tensor]:
        names = dict.fromkeys((*one.reads(plan), *(n for node in one.nodes(plan) for n in node.writes)))
        found = (held(model, v) for n in names if (v := plan.values.get(n)) is not None and v.is_state)
        return {id(t): t for t in found}

    theirs: dict[int, list[torch.Tensor]] = {}
    for t in state(other).values():
        if (memory := storage_of(t)) is not None:
            theirs.setdefault(memory, []).append(t)
    for t in state(part).values():
        for view in theirs.get(storage_of(t) or 0, ()):
            if view is not t and (view.requires_grad or t.requires_grad):
                raise FrontierError(
                    f"the halves at {candidate.split_id} can't part: a parameter of shape {list(t.shape)} that the {part.name} "
                    f"uses shares memory with a tensor of shape {list(view.shape)} that the {other.name} uses, and each file would "
                    "have a copy, which training leaves stale. Cut elsewhere, or take the view in forward"
                )


def _refuse_filled(plan: TracePlan, baseline: Baseline, part: Part) -> None:
    """Raise `HalfError` where a side fills a buffer that was None at capture by what another call would fill it with otherwise."""
    same = set(plan.constants)  # in each call
    for node in plan.nodes:
        if not node.seeded and same.issuperset(uses((node.args, node.kwargs))):  # of no size, either
            same.update(node.outputs)
        else:
            same.difference_update(node.writes)
    for store in part.stores(plan):
        if baseline.is_filled_by(store) and not same.issuperset(uses(store.atoms)):
            raise HalfError(
                f"forward fills the buffer {store.name!r} of {named(store.path)} at its first call, and a file would fill it at "
                "each one. Run the model once, then prepare and save"
            )


def slots(model: nn.Module, sides: Sequence[tuple[Side, Cut]]) -> list[Slot]:
    """The tensors that the plans of a half read or store, one for each that the model has."""
    found: dict[int, Slot] = {}
    persistent = cache(lambda path: model.get_submodule(path)._non_persistent_buffers_set)
    taken: dict[Place, int] = {}

    def add(place: Place, t: torch.Tensor, keep: bool, plain: bool = False) -> None:
        if taken.setdefault(place, id(t)) != id(t):
            raise HalfError(f"two tensors of the model would have the name {place[2]!r} in {place[1]!r}; rename one")
        slot = found.setdefault(id(t), Slot([], t, keep))
        if place not in slot.places:
            slot.places.append(place)
        if plain:
            slot.plain.add(place)

    for side, cut in sides:
        for n in side.plan.values:
            value = cut.plan.values[n]
            if value.is_state:
                kind, path, key = origin_of(value)
                keep = value.kind == "parameter" or (value.kind == "buffer" and key not in persistent(path))
                add((kind, path, key), held(model, value), keep, value.kind == "attribute")
        for store in side.plan.stores:
            table = model.get_submodule(store.path)._buffers if store.table == "_buffers" else {}
            if (now := table.get(store.name)) is not None:
                add(("buffer", store.path, store.name), now, store.name not in persistent(store.path))
    for _, cut in sides:
        for ties in cut.baseline.ties:
            for path, where, key in ties:
                now = model.get_submodule(path).__dict__[where].get(key)
                if now is not None and id(now) in found:
                    add((where[1:-1], path, key), now, found[id(now)].persistent)
    return list(found.values())


def save(
    path: str | os.PathLike[str],
    name: str,
    model: nn.Module,
    cuts: Iterable[Cut],
    about: Mapping[str, Any],
    *,
    keep: bool = True,
) -> None:
    """Write one side of a split: its plans, and the tensors that they read (their names and types alone, if not `keep`).

    `about` is plain data that stands in the file as it is.
    """
    sides = [(side_of(cut, name, model), cut) for cut in cuts]
    kept = slots(model, sides)
    _refuse_untold(kept, keep)
    constants = {f"constant {i} {n}": t for i, (s, _) in enumerate(sides) for n, t in s.plan.constants.items()}
    packed, packs = gathered(s.plan for s, _ in sides)
    if packed and not keep:
        raise HalfError(
            "a quantized layer has packed weights, which `load` can't take from a state dict; save this half with its weights"
        )
    named = {_key(slot): slot.tensor for slot in kept}
    if keep:
        tensors, rows = weights.gather({**named, **constants, **packed})
    else:
        tensors, rows = weights.gather(constants)
        rows |= weights.gather(named, data=False)[1]
    targets = {
        n.target
        for s, _ in sides
        for n in s.plan.nodes
        if n.target not in _UNNAMED and not n.target.startswith("python.")
    }
    places = {id(p): i for i, p in enumerate(model.parameters())}
    names, whole = named_in(model), Whole.of(model)
    half = {
        **about,
        **_forward(name, model, about),
        "order": {_key(slot): places[id(slot.tensor)] for slot in kept if id(slot.tensor) in places},
        "format": 0,
        "ariadne": VERSION,
        "torch": torch.__version__,
        "part": name,
        "model": type(model).__name__,
        "weights": keep,
        "digest": whole.digest({**dict(_tensors_of(model)), **dict(packed_in(model))}) if keep else "",
        "whole": whole.told(),
        "ops": {t: ops.schema_of(ops.resolve(t)) for t in sorted(targets)},
        "state": [slot.held(rows[_key(slot)]).told() for slot in kept],
        "flags": [[path, on] for path, on in _flags(name, sides).items()],
        "plans": [
            told_side(
                s,
                {n: rows[f"constant {i} {n}"] for n in s.plan.constants},
                {
                    n: told_packed(packs[i][n], rows) if n in packs[i] else told_object(o, names)
                    for n, o in s.plan.objects.items()
                },
                model,
            )
            for i, (s, _) in enumerate(sides)
        ],
    }
    half["format"] = _format(half["plans"], sides)
    told = json.dumps(half, separators=(",", ":"))
    _read_back(told)
    weights.write(path, told, tensors)


def _forward(name: str, model: nn.Module, about: Mapping[str, Any]) -> dict[str, Any]:
    """What forward calls its inputs, in the file of a side that takes these."""
    told = told_parameters(model) if name == SIDES[0] and "pipeline" not in about else None
    return {} if told is None else {"forward": told}


def _format(plans: Any, sides: Iterable[tuple[Side, Cut]]) -> int:
    """The oldest format that has words for all of it."""
    if _has_structures(plans):
        return FORMATS[2]
    return FORMATS[any(s.plan.apart is not None and s.plan.apart.number >= 0 for s, _ in sides)]


def _has_structures(told: Any) -> bool:
    """Whether a structure among these data is of a kind whose words are of format 3."""
    if isinstance(told, dict):
        return told.get("kind") in ("fields", "row") or any(map(_has_structures, told.values()))
    return isinstance(told, (list, tuple)) and any(map(_has_structures, told))


def _flags(name: str, sides: Iterable[tuple[Side, Cut]]) -> dict[str, bool]:
    """The training flags that a side relies on, as they were at capture."""
    return {path: on for _, cut in sides for path, on in cut.baseline.training.items() if path in cut.guarded[name]}


def _read_back(told: str) -> None:
    """Raise `HalfError` unless what was written is read again, as `load` does it; what it names of Python is taken as allowed."""
    half = weights.parsed_text(told)
    try:
        spaces = frozenset(target.partition(".")[0] for target in half["ops"])
        found = said(half, Classes(trusting=True), spaces)
        empty = {str(i): torch.empty(0, dtype=h.row.dtype, device="meta") for i, h in enumerate(found.state)}
        root = skeleton(found.state, empty, found.sides[0].plan.training, found.flags, found.stored)
        make(root, found.containers)
    except HalfError as error:
        why = (
            str(error)
            .removeprefix("this is not a half as Ariadne writes it: ")
            .removesuffix(". Save it again, or refuse who sent it")
        )
        raise HalfError(
            f"this half can't be kept in a file: {why}. Rename it, if a name is the reason, or run this half beside the model"
        ) from error


def _refuse_untold(kept: Iterable[Slot], keep: bool) -> None:
    """Raise `HalfError` for what stands in no file: hooks, a graph that it came out of; without weights, what no state dict has."""
    for slot in kept:
        t = slot.tensor
        if not keep and not slot.persistent:
            raise HalfError(
                f"{_key(slot)!r} is in no state dict of the model, so a half without weights would get it from nowhere; save it "
                "with its weights, or register it as a persistent buffer"
            )
        if not t.is_leaf:
            raise HalfError(
                f"{_key(slot)!r} was computed from other tensors, which gradients go on to, and a file has only its numbers; "
                "compute it in forward, or keep a detached copy"
            )
        if t.requires_grad and (t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None)):
            raise HalfError(
                f"{_key(slot)!r} has a hook on its gradient, which a file can't hold: a half would train without it. Remove the "
                "hook, save, and register it on the half's parameter"
            )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers of a model, by each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _key(slot: Slot) -> str:
    _, path, key = slot.places[0]
    return f"{path}.{key}".removeprefix(".")
