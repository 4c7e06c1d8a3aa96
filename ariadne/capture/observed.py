"""Observed runs: a real run of forward, recorded; the model is put back as it was."""

from __future__ import annotations

import random
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import generators
from ariadne.capture.begun import (
    beginnings,
    begun,
    is_looked_into,
    refuse_begun,
    refuse_gone_on,
    refuse_registered,
)
from ariadne.capture.carried import carried
from ariadne.capture.clocks import refuse_world
from ariadne.capture.context import in_its_own_context
from ariadne.capture.drawn import drawn_from, put_back
from ariadne.capture.example import Evidence, Example, called
from ariadne.capture.filled import counted, left_by, made_of, made_of_inputs, reads_of
from ariadne.capture.flags import set_in
from ariadne.capture.generalize import SIZE
from ariadne.capture.grown import refuse_asked
from ariadne.capture.history import History, alike, assigned_once, gives, lived, puts_again
from ariadne.capture.hung import attributes_set, refuse_hung, refuse_hung_again, refuse_hung_on_results
from ariadne.capture.identity import compares, watching
from ariadne.capture.lower import Lowering
from ariadne.capture.once import Moved, refuse_once
from ariadne.capture.outcome import refuse_unrun
from ariadne.capture.parts import refuse_shared
from ariadne.capture.ran import detached
from ariadne.capture.reach import Reach
from ariadne.capture.recorded import recording
from ariadne.capture.recorder import sizes_in
from ariadne.capture.repeated import refuse_repeated
from ariadne.capture.settled import Held, Key, refuse_change, settles
from ariadne.capture.sizes import Watch
from ariadne.capture.state import Snapshot
from ariadne.capture.taken import counted as counted_reads
from ariadne.capture.threads import refuse_elsewhere
from ariadne.capture.unheard import refuse_unheard
from ariadne.capture.values import state_tensors
from ariadne.capture.written import Undone, read_by
from ariadne.compare import difference
from ariadne.errors import AriadneError, UnsupportedError, named
from ariadne.guards import (
    MISSING,
    Change,
    Effects,
    Place,
    Put,
    Recording,
    attributes_of,
    effects_of,
    hearing,
    is_a,
    refusal,
    stores_beside_caches,
    stores_of,
)
from ariadne.plan import (
    Batches,
    Ref,
    TracePlan,
    check,
    layout,
    other_layout,
    prune,
    tensors_in,
)

_UNTIL_WARM = 4  # runs after which a scripted function must have come to what it stays at


@dataclass(frozen=True)
class Observation:
    """One recorded real run: its plan, its output, and the shapes of what each recorded op made.

    `unpruned`: the plan with the ops whose results nothing uses, which may be unable to run at another batch. `unforeseen`: sizes
    in it that are looked at again in each call, for nothing tells whether they follow data. `history`: what further runs showed of
    what forward keeps, where this was the first one. `settled`: attributes that it read and changed, with what stood there before
    and after; `primed`: those that held this run's batch before, and hold that of every call. `carried`: what it made of its inputs
    and keeps, in words, if what later calls give follows it. `beginnings`: see `begun`.
    """

    plan: TracePlan
    unpruned: TracePlan
    evidence: Evidence
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    recorded: Recording
    unforeseen: frozenset[str]
    effects: Effects
    history: History | None = None
    settled: Mapping[Key, tuple[Any, Any]] = field(default_factory=dict)
    primed: Sequence[Key] = ()
    carried: tuple[str, ...] = ()
    beginnings: Mapping[Key, Any] = field(default_factory=dict)

    @cached_property
    def plans(self) -> tuple[TracePlan, ...]:
        """The plan; and, where it has ops for the sake of their sizes alone, the plan without those.

        A symbolic plan knows these sizes by name, and has no need of an op whose size nothing uses.
        """
        nodes = self.unpruned.nodes
        if not any(node.is_witness and node.target == SIZE for node in nodes):
            return (self.plan,)
        bare = tuple(replace(n, is_witness=False, witness=None) if n.target == SIZE else n for n in nodes)
        return self.plan, prune(replace(self.unpruned, nodes=bare))


def with_stores(
    plan: TracePlan,
    effects: Effects,
    changes: Mapping[Place, Change],
    put: Mapping[tuple[Place, Any], Put],
    reach: Reach,
) -> TracePlan:
    """The plan with what its run put into containers, as two runs showed that forward does at each call."""
    strange = next((place for place in changes if place not in effects.known), None)
    if strange is not None:
        raise refusal(strange, "changes in some runs alone")
    beside = stores_beside_caches(sorted(effects.assigned | effects.kept), put)
    again = (s for s in plan.stores if s.table != "__dict__" or (s.path, s.name) not in effects.once)
    stores = (*again, *beside, *stores_of(effects.rules, changes, put))
    roots = {root.name: root.thing for root in reach.outside.roots}
    objects = {s.path: roots[s.path] for s in stores if s.table == "outside"}
    return check(replace(plan, stores=stores, objects={**plan.objects, **objects}))


@in_its_own_context
def observe(
    model: nn.Module,
    example: Example,
    batch: int,
    batch_symbol: str,
    grad: bool,
    watch: Watch | None = None,
    effects: Effects | None = None,
    perturbed: bool = False,
    other: int = 0,
) -> Observation:
    """Run the forward on real tensors of this batch: the plan of that run, all its numbers as they were, and the output.

    With a `watch`, sizes that follow the batch note what is asked of them. Without `effects`, of an earlier observation, the model
    runs once more in the state that the first run left Python in, and must give the same: what it does to containers in both runs
    is no cache; and on other inputs at batch `other` (see `history`). A function under `torch.jit.script` may round in another
    way once it is warm: then the model runs until it gives the same twice, and that is the output.
    """
    leaves = example.resized(batch, perturbed)
    laid, hung_before = [_laid(leaf) for leaf in leaves], attributes_set(leaves)
    reach = Reach(model)
    args, kwargs = tree.unflatten(leaves, example.spec)
    snapshot = reach.snapshot(args, kwargs)
    snapshot.save_buffers()
    state = state_tensors(snapshot)
    containers = reach.containers(args, kwargs)
    found: Recording | None = None
    try:
        if watch is not None:
            for i, dim in example.batched.items():
                watch.tell(leaves[i], tuple(batch_symbol if d == dim else None for d in range(leaves[i].dim())))
        with torch.set_grad_enabled(grad), recording(model, None, snapshot, watch) as (found, _):
            found.output = model(*args, **kwargs)
        left_by_first = Moved.by(snapshot, generators.TORCH in found.drew)
        refuse_unrun(found.output)
        _refuse_laid_anew(laid, leaves, called(model, example.spec))
        found.effects = containers.changes(snapshot.is_inside)
        containers.refuse_ordering(found.names)
        settled = _refuse_python_state(found, snapshot, batch, effects)
        marked = refuse_hung(snapshot)
        refuse_hung_on_results(found.output, leaves, hung_before, state)
        _refuse_strides(found, leaves)
        low = Lowering(
            model, found, snapshot, state, leaves, example.batched, None, batch_symbol, {}, called(model, example.spec)
        )
        unpruned = low.plan(example.spec, batch, Batches(((batch, batch),)), "observed", grad)
        changes, put, unforeseen, slots = dict(found.effects), low.put, frozenset(low.unforeseen), low.filled
        del low
        output = detached(found.output)
        shapes = tuple(
            tuple(sizes_in(found.before(t, k)) for t in tensors_in(e.out)) for k, e in enumerate(found.events, 1)
        )
        again = bool(found.again)  # an op gave back what it was given, and the plan has two names for it
        found.forget_tensors()
        found.output = None  # what recorded it lives on in a cycle, and with it the graph of a result
        first, attributes, left, heard = effects is None, {}, begun(found), set[str]()

        def once_more(drew: frozenset[str] = frozenset(found.drew)) -> Any:
            snapshot.again(drew)
            return gives(model, example, batch, grad, (), snapshot).output

        reading = Counter(filter(None, (read_by(n.target) for n in unpruned.nodes if n.is_witness)))
        for more in reversed(range(_UNTIL_WARM if found.scripted else first)):
            snapshot.again(found.drew)
            args, kwargs = tree.unflatten(example.resized(batch, perturbed), example.spec)
            containers = reach.containers(args, kwargs)
            attributes = attributes_of(snapshot.modules)
            undone = Undone(snapshot)
            reads = counted_reads(undone) if first and reading else nullcontext()
            watched = watching(found.codes if first else ())
            with torch.set_grad_enabled(grad), watched as compared, undone, reads, hearing(found.world, heard):
                now = _again(model, args, kwargs)
            found.compared = found.compared or next(iter(compared), "")
            refuse_hung_again(snapshot, marked)
            refuse_begun(snapshot.modules, left)
            for name, kept in found.moving:
                if not kept.is_same():
                    raise UnsupportedError(
                        f"forward changes what is in {name} at each call (now {kept.now()}), which a plan can't follow; return it "
                        "instead, or keep it in a buffer"
                    )
            differs = difference(output, now)
            if not differs:
                break
            if more:
                output = detached(now)
            elif again and (code := next(filter(compares, found.codes), None)) is not None:
                raise UnsupportedError(
                    f"forward gives another result when it runs again ({differs}), and {code.co_name!r} compares by `is`: whether "
                    "an op such as contiguous() or float() gave back the very tensor that it was given, no plan can tell. Ask for "
                    "that itself, by is_contiguous() or dtype"
                )
            else:
                set_by_it = ", ".join(
                    dict.fromkeys(f"{name!r} of {named(path)}" for path, name, *_ in found.changed[:4])
                )
                raise UnsupportedError(
                    f"forward gives another result when it runs again on the same input with the same random numbers ({differs}): "
                    f"it keeps state in Python{set_by_it and f' (it sets {set_by_it})'}, draws from a generator of its own, or is "
                    "not deterministic. Keep state in buffers, and draw from torch's RNG"
                )
        if effects is not None:
            refuse_world(found.world, effects.asked_once, None)
        history, primed = None, list[Key]()
        if effects is None:
            left_by_second = Moved.by(snapshot, undone.drew)
            second, assigned = containers.changes(snapshot.is_inside), {
                key
                for key, value in attributes_of(snapshot.modules).items()
                if (was := attributes.get(key, MISSING)) is not value and not alike(was, value)
                and not snapshot.is_inside(snapshot.modules[key[0]].__dict__, key[1])
            }  # fmt: skip
            given = partial(tree.unflatten, example.resized(batch, perturbed), example.spec)
            shown = puts_again(model, given, grad, reach, snapshot, output, found.drew, changes)
            if shown is not None:
                containers, second, assigned = shown
            effects = effects_of(changes, second)
            effects.assigned = assigned
            effects.again = {**effects.rules}, {*effects.assigned}
            _refuse_renewed(found, effects)
            moved = bool(found.changed or found.containers or changes)
            held = Held(snapshot.modules, settled, left)
            if other not in (0, batch):
                held.look(found.read_attributes, found.changed, batch)
            history = lived(
                model, example, batch, other or batch, grad, reach, snapshot, output, found.drew, moved, held.left
            )
            effects.settled, primed = set(settled), held.primed
            effects.renew(changes, history.renewed)
            effects.assigned |= history.assigned - found.read_attributes.keys()
            flags = set_in(found, snapshot.modules)
            besides = [change for change in found.changed if change[:2] not in flags]
            effects.kept = held.kept(besides, effects.assigned, bool(effects.known - effects.rules.keys())) | {*flags}
            refuse_unheard(snapshot)
            found.flags = held.flags(besides, effects.assigned)
            # Of those that held nothing before, too, forward may ask anything.
            settled |= (
                {key: change for key, change in held.holders.items() if change[0] is None} | flags | held.of_begun
            )
            effects.holders = {key for key, (_, now) in settled.items() if type(now) is int}

            once = found.world.keys() - heard
            effects.asked_once = refuse_world(found.world, once, lambda: not difference(output, once_more()))
            refuse_asked(once_more, output, containers, effects.rules, history.larger)
            if is_looked_into(left, found, snapshot.modules):
                refuse_gone_on(model, example, batch, grad, found.drew, snapshot, left, _refuse_strange)
            effects.read_once = frozenset(how for how, times in reading.items() if undone.asked[how] < times)
            if still := _standing(unpruned, snapshot.modules, found.changed, effects):
                effects.once = assigned_once(snapshot.modules, still, once_more)
        refuse_repeated(found, unpruned, snapshot, effects.rules, containers)
        unpruned = with_stores(unpruned, effects, changes, put, reach)
        found.made_of = made_of(slots, unpruned, effects)
        found.decided = reads_of(unpruned, found, effects)
        found.left = left_by(slots, unpruned, found.decided, effects)
        if first and found.left:
            found.left = counted(found.left, changes, lambda: difference(output, once_more()) is None)
        filled = made_of_inputs(slots, unpruned, effects, bool(found.drew)) if first else {}
        goes_on = carried(model, example, batch, grad, found.drew, snapshot, filled, changes)
        if first and not goes_on:  # else what is set up is refused by its name
            refuse_once(snapshot, left_by_first, left_by_second)
        plan = check(prune(unpruned))
        return Observation(
            plan,
            unpruned,
            Evidence(batch, output),
            shapes,
            found,
            unforeseen,
            effects,
            history,
            settled,
            primed,
            goes_on,
            beginnings(found, unpruned) if first else {},
        )
    finally:
        put_back(snapshot, found)


def _again(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What forward gives in a second run; `UnsupportedError` where that raises, since in the state of a first call it did not."""
    try:
        return model(*args, **kwargs)
    except AriadneError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"forward raises {type(error).__name__} when it runs again with tensors as they were, in the state in which its first "
            f"call left Python: {str(error)[:200]}. What it sets up once goes with what it keeps in tensors. Run the model once, "
            "and prepare then"
        ) from error


def _standing(
    plan: TracePlan, modules: Mapping[str, nn.Module], changed: Iterable[tuple[str, str, Any, Any]], effects: Effects
) -> dict[Key, Any]:
    """What the plan assigns to attributes, of tensors that its ops make, and that still is the very object that its run left; where
    the first run alone read numbers, what it assigns of numbers, too."""
    made = {name for node in plan.nodes for name in node.outputs}
    stored = {
        (s.path, s.name)
        for s in plan.stores
        if s.table == "__dict__"
        and any(atom.name in made if isinstance(atom, Ref) else bool(effects.read_once) for atom in s.atoms)
    }
    return {
        (path, name): now
        for path, name, _, now in changed
        if (path, name) in stored - effects.assigned and modules[path].__dict__.get(name) is now
    }


def _refuse_renewed(found: Recording, effects: Effects) -> None:
    """Raise `UnsupportedError` for an attribute that forward reads and changes in the second run, too: it is no cache."""
    for path, name, _, _ in found.changed:
        if (path, name) in effects.assigned and (path, name) in found.read_attributes:
            raise UnsupportedError(
                f"forward reads and changes the attribute {name!r} of {named(path)} at every call, which a plan can't follow; "
                "return what it keeps there, or keep it in a buffer"
            )


def _stood(module: nn.Module, name: str) -> bool:
    """Whether the class has something that stands for an attribute which a module doesn't have: not where it makes it first."""
    kind: Any = type(module)
    there = next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), MISSING)
    if there is MISSING:
        return kind.__getattr__ is not nn.Module.__getattr__
    return not is_a(there, cached_property)


def _moves_on(value: Any) -> str:
    """What an attribute is that gives something else whenever it is asked, in words; empty for all others."""
    numbers = sys.modules["numpy"].random if "numpy" in sys.modules else None
    if is_a(value, random.Random) or (numbers and is_a(value, (numbers.Generator, numbers.RandomState))):
        return "a generator of random numbers of its own"
    return "an iterator" if is_a(value, Iterator) and not is_a(value, (torch.Tensor, *weakref.ProxyTypes)) else ""


def refuse_layouts(model: nn.Module, example: Example) -> None:
    """Raise `UnsupportedError` for inputs that are sparse or nested, whose memory no plan tells, and for sparse parameters."""
    odd = next(((name, how) for name, p in model.named_parameters() if (how := other_layout(p))), None)
    if odd is not None:
        raise UnsupportedError(
            f"the parameter {odd[0]!r} is {odd[1]}, whose memory no plan tells; keep it dense, or in a buffer"
        )
    args, kwargs = tree.unflatten(example.leaves, example.spec)
    for label, leaf in (*tree.paths(args), *(found for key in kwargs for found in tree.paths(kwargs[key], repr(key)))):
        if isinstance(leaf, torch.Tensor) and (how := other_layout(leaf)):
            raise UnsupportedError(
                f"input {label} is {how}, and a plan follows the memory of dense inputs alone; hand it in dense, or keep it in a "
                "buffer of the model"
            )


def _laid(leaf: Any) -> tuple[tuple[int, ...], ...]:
    """Sizes and strides of a dense tensor; of anything else nothing."""
    dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return (tuple(leaf.shape), leaf.stride()) if dense else ()


def _refuse_laid_anew(before: Sequence[Any], leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Raise `UnsupportedError` where forward leaves an input with other sizes or strides than it came with."""
    for was, leaf, name in zip(before, leaves, names, strict=True):
        if (now := _laid(leaf)) != was:
            raise UnsupportedError(
                f"forward gives the input {name!r} other sizes or strides in place, {[*was[0]]} by {[*was[1]]} before and "
                f"{[*now[0]]} by {[*now[1]]} after, and a plan takes an input as it comes. Use the op that makes a view, such as "
                "x.unsqueeze(1) or x.t(), in place of x.unsqueeze_(1) or x.t_()"
            )


def _refuse_strides(found: Recording, leaves: Sequence[Any]) -> None:
    """Raise `UnsupportedError` where forward asks for strides, and an input's are none that follow from its sizes."""
    odd = next((t for t in leaves if isinstance(t, torch.Tensor) and not any(layout(t, True))), None)
    if "strides" in found.looked and odd is not None:
        raise UnsupportedError(
            f"forward asks for strides, and those of an input of sizes {list(odd.shape)}, {list(odd.stride())}, follow what it was "
            "cut from, which no guard sees; pass input.contiguous(), or don't ask"
        )


def _refuse_python_state(
    found: Recording, snapshot: Snapshot, batch: int, effects: Effects | None
) -> dict[Key, tuple[Any, Any]]:
    """Raise `UnsupportedError` for what no plan can follow; returns the attributes of which that is still to be found out."""
    settled: dict[Key, tuple[Any, Any]] = {}
    _refuse_strange(found, snapshot)
    for path, name, before, now in found.changed:
        if (kind := _moves_on(now)) and (path, name) in found.missing | found.read_attributes.keys():
            raise UnsupportedError(
                f"forward sets up the attribute {name!r} of {named(path)} when it first runs, {kind}: it gives something else at "
                "each call, which a plan would freeze. Draw from torch's RNG, or keep what counts in a buffer"
            )
        if before is None and (path, name) in found.read_attributes:
            module, value, _ = found.read_attributes[path, name]  # what the class has stood for it
            before = value if _stood(module, name) else None
        counts = isinstance(before, (bool, int, float)) and not tree.identical(before, now)
        keeps = isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)
        if (path, name) in found.read_attributes and (counts or keeps):
            if keeps:
                before, now = "one tensor", "another"
            elif settles(before, now, batch) and (effects is None or (path, name) in effects.settled):
                settled[path, name] = before, now
                continue
            refuse_change((path, name), before, now, _grows(found, path))
    return settled


def _grows(found: Recording, path: str) -> bool:
    """Whether forward replaced tensors of a module, and a number there became larger: tables that were too short."""
    of_it = [(before, now) for at, _, before, now in found.changed if at == path]
    replaced = any(is_a(before, torch.Tensor) and is_a(now, torch.Tensor) for before, now in of_it)
    replaced = replaced or any(at == path for at, *_ in found.stores)
    return replaced and any(type(before) is type(now) is int and now > before for before, now in of_it)


def _refuse_strange(found: Recording, snapshot: Snapshot) -> None:
    """Raise `UnsupportedError` for what no plan can follow, whatever a further call shows."""
    refuse_elsewhere(found)
    refuse_unheard(snapshot)
    if found.disturbed:
        raise UnsupportedError(
            "another thread drew from torch's random generator while forward, which draws too, was captured: which numbers are "
            "whose can't be told. Prepare, and call each new batch size once, while no other thread draws"
        )
    if found.deaf:
        raise UnsupportedError(
            "forward starts a profiler of its own (cProfile, sys.setprofile, torch.profiler with stacks), and what it reads while "
            "that listens is hidden from the capture. Profile around the call of the model instead"
        )
    if found.unseen:
        raise UnsupportedError(
            f"forward reads {found.unseen}, whose state no guard can see: a plan would go on with what it was at capture. Ask it "
            "before the call, and pass the answer as an argument; or keep such state in a buffer"
        )
    moved = drawn_from(found, snapshot)
    if moved:
        found.drew.update(moved)
        raise UnsupportedError(
            f"forward draws from {' and '.join(moved)}, whose numbers would be frozen in the plan; draw from torch's RNG instead"
        )
    refuse_shared(found, snapshot)
    refuse_registered(found, snapshot)
    for (path, name), (module, _, _) in found.read_attributes.items():
        kind = _moves_on(module.__dict__.get(name))
        if kind:
            raise UnsupportedError(
                f"forward reads the attribute {name!r} of {named(path)}, {kind}: it gives something else at each call, which a "
                "plan would freeze. Draw from torch's RNG, or keep what counts in a buffer"
            )
    for path, name, what in snapshot.registered():
        raise UnsupportedError(
            f"forward registers, replaces or removes the {what} {name!r} of {named(path)}, which no plan does; if it does so "
            "when it runs first, run the model once, model(*example_inputs), and prepare then"
        )
