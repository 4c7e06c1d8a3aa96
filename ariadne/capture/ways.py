"""Capture: from a model and example inputs to a plan, by the first way that serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ariadne import tree
from ariadne.capture.example import Captured, Evidence, Example
from ariadne.capture.first import emptied, filled_again, filled_before
from ariadne.capture.followed import ReadError
from ariadne.capture.generalize import (
    SIZE,
    Disagreement,
    at_batch,
    disagreement,
    evaluated,
    expressed,
    generalize,
    size_sources,
    unexplained,
    with_views_of,
    without_slices_of_all,
)
from ariadne.capture.lower import Lowering, state_tensors
from ariadne.capture.recorder import recording, sizes_in
from ariadne.capture.refusals import refuse_scripted
from ariadne.capture.shapes import PlainNumberError, Sizes, symbolic_batch, within_questions, within_shapes
from ariadne.capture.sizes import Watch, holding
from ariadne.capture.state import Snapshot
from ariadne.compare import difference
from ariadne.errors import CaptureError, UnsupportedError, named
from ariadne.guards import (
    GLOBAL_HOOKS,
    MISSING,
    Baseline,
    Change,
    Containers,
    Effects,
    Given,
    Place,
    Put,
    Recording,
    attributes_of,
    effects_of,
    follow,
    global_hooks,
    outside_of,
    refusal,
    simple,
    stores_beside_caches,
    stores_of,
    strays,
    switches,
)
from ariadne.plan import (
    Assumption,
    Batches,
    Expr,
    Groups,
    TraceNode,
    TracePlan,
    check,
    own,
    prune,
    reached,
    tensors_in,
    where,
)

TYPED_CLASSES = frozenset(name for name in dir(torch) if name.endswith("Tensor") and name != "Tensor")
_UNTIL_WARM = 4  # runs after which a scripted function must have come to what it stays at


_OTHER_SEED = 8725724278030350  # any but the one that is in use


@dataclass(frozen=True)
class Observation:
    """One recorded real run: its plan, its output, and the shapes of what each recorded op made.

    `unpruned`: the plan with the ops whose results nothing uses, which may be unable to run at another batch. `unforeseen`: sizes
    in it that are looked at again in each call, for nothing tells whether they follow data. `later`: what forward gave on other
    inputs, where the first run had left something in Python that it may have used.
    """

    plan: TracePlan
    unpruned: TracePlan
    evidence: Evidence
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    recorded: Recording
    unforeseen: frozenset[str]
    effects: Effects
    later: Any = None

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


def capture(
    model: nn.Module, example: Example, *, batch_symbol: str, batches: range, grad: bool, needed: bool = False,
    like: TracePlan | None = None,
) -> Captured:  # fmt: skip
    """The plan of the model's forward on inputs like `example`, for as many of `batches` as it can be shown to hold for.

    Tried in this order: symbolic; observed at several batch sizes; observed at the example's batch alone. Whatever made
    the plan, real runs at the example's batch and at batch 1 are held against it, op by op. `grad`: gradients enabled.
    `needed`: the plan must serve the example's own batch, be it that batch alone. `like`: a plan of other batches; where a real
    run does what it says, that run is the plan of the example's batch, and nothing else is tried.

    Raises `UnsupportedError` where forward does something that no plan can hold, and what the model raises itself.
    """
    size = example.batch if example.batch in batches else max(batches.start, min(2, batches.stop - 1))
    refuse_hooks(model)
    refuse_scripted(model)
    real = observe(model, example, size, batch_symbol, grad)
    slots = filled_again(
        filled_before(dict(model.named_modules()), real.recorded),
        lambda full: _still_gives(model, example, size, grad, real.evidence.output, full),
    )
    if slots:
        with emptied(slots):
            fresh = observe(model, example, size, batch_symbol, grad)
            if _sets_up(model, example, fresh, grad) is None:
                return _captured(model, example, fresh, batch_symbol, batches, grad, needed, like)
    else:
        _refuse_first_of_many(real, _sets_up(model, example, real, grad))
    return _captured(model, example, real, batch_symbol, batches, grad, needed, like)


def _sets_up(model: nn.Module, example: Example, real: Observation, grad: bool) -> str | None:
    """What a later call gives otherwise for what the first had left in Python, if that follows from that call's inputs."""
    if real.later is None:
        return None
    args, kwargs = tree.unflatten(example.leaves, example.spec)
    snapshot = Reach(model).snapshot(args, kwargs)
    snapshot.save_written(real.plan)
    return difference(_gives(model, example.turned(), real.evidence.batch, grad, snapshot), real.later)


def _still_gives(
    model: nn.Module, example: Example, batch: int, grad: bool, output: Any, holds: Callable[[], bool]
) -> bool:
    """Whether a run of the model as it is now gives this output, and something holds then; the model is put back after."""
    args, kwargs = tree.unflatten(example.resized(batch), example.spec)
    snapshot = Reach(model).snapshot(args, kwargs)
    snapshot.save_buffers()
    try:
        with torch.set_grad_enabled(grad):
            return difference(output, model(*args, **kwargs)) is None and holds()
    except Exception:  # it needs what was taken away
        return False
    finally:
        snapshot.restore()


def _captured(
    model: nn.Module, example: Example, real: Observation, batch_symbol: str, batches: range, grad: bool, needed: bool,
    like: TracePlan | None,
) -> Captured:  # fmt: skip
    size, effects = real.evidence.batch, real.effects
    reasons: list[tuple[str, str]] = []
    plan: TracePlan | None = None
    plain = False  # of a size, forward was seen to make a plain number
    others: list[Recording] = []  # what the plan rests on besides the run at the example's batch
    if like is not None and size == example.batch and not disagreement(like, real.plan):
        plan, batches = at_batch(real.plan, size), range(size, size + 1)
        reasons = [*like.not_captured_by]
    else:
        try:
            plan = symbolic(model, example, batch_symbol, batches, grad, effects, others)
        except UnsupportedError as error:
            plain = isinstance(error, PlainNumberError)
            reasons.append(("symbolic", str(error)))
        except Exception as error:  # whatever torch's fake tensors raise: the next way runs real ones
            reasons.append(("symbolic", _first_line(error)))
    if plan is not None and plan.captured_by == "symbolic":
        seen = next((s for s in real.plans if not disagreement(without_slices_of_all(plan, s), s)), real.plan)
        plan = without_slices_of_all(plan, seen)
        differs = disagreement(plan, seen) if size in plan.batches else f"batch {size} is not covered"
        if differs:
            reasons.append(("symbolic", f"not what a real run does: {differs}"))
            plan, others = None, []
        else:
            plan = with_views_of(plan, seen)
    if plan is None or _above_1(batches) - plan.batches:
        ran: list[Recording] = []
        observed = _observed(model, example, batch_symbol, batches, grad, real, reasons, ran, plain)
        if plan is None or len(observed.batches) > len(plan.batches):
            if plan is not None:
                reasons.insert(0, ("symbolic", "; ".join(plan.excluded)))
            plan, others = observed, ran
    plan, more = _at_batch_1(model, example, plan, batches, grad, others, effects)
    if needed and example.batch not in plan.batches:
        reasons.append((plan.captured_by, "; ".join(plan.excluded)))
        plan, more, others = at_batch(real.plan, example.batch), [], []
    plan, recordings = replace(plan, not_captured_by=tuple(reasons)), [real.recorded, *others]
    asks_grad = grad and plan.assumption.grad is None
    # Fake tensors have no data to take: a symbolic plan has them, if at all, in a tensor that no op made.
    leaks = plan.captured_by != "symbolic" or bool(plan.constants)
    if leaks:
        other = _perturbed(model, example, size, batch_symbol, grad and not asks_grad, effects)
        if other is not None and size in plan.batches and not _differs(plan, other):
            asks_grad = leaks = False  # neither other numbers nor gradients change what forward does
            recordings.append(other.recorded)
    if asks_grad:
        other = observe(model, example, size, batch_symbol, False, effects=effects)
        recordings.append(other.recorded)
        if size in plan.batches and _differs(plan, other):
            plan = replace(plan, assumption=replace(plan.assumption, grad=True))
    asked = set[str]().union(*(recorded.switches for recorded in recordings))
    plan = replace(plan, assumption=replace(plan.assumption, switches=switches.state_of(asked)))
    if any(
        recorded.names & TYPED_CLASSES for recorded in recordings
    ):  # `isinstance` asks them, and nothing hears of it
        plan = replace(plan, assumption=replace(plan.assumption, dtypes=True))
    classes = tuple(tree.subclass_of(example.leaves[i]) for i, name in plan.inputs if plan.values[name].kind == "input")
    if any(classes):
        plan = replace(plan, assumption=replace(plan.assumption, classes=classes))
    if leaks:
        other = _perturbed(model, example, size, batch_symbol, grad, effects)
        if other is not None and unexplained(real.plan, other.plan):
            again = observe(model, example, size, batch_symbol, grad, effects=effects)  # with caches filled, as there
            if unexplained(real.plan, again.plan) is None:
                _refuse_leaks(real.plan, other.plan)
            else:  # objects are made anew, or a cache is filled: what is no data's doing is alike in the two later runs
                _refuse_unlike_constants(again.plan, other.plan)
                _refuse_kept_data(real.plan, again.plan)
    plan = replace(plan, given=_given(plan, example))
    return Captured(check(plan), (real.evidence, *more), Baseline(model, recordings))


def _differs(plan: TracePlan, seen: Observation) -> str | None:
    """Where a real run does not do what a plan of other runs says; None if nowhere."""
    plans = seen.plans if plan.captured_by == "symbolic" else (seen.plan,)
    found = [disagreement(plan, one) for one in plans]
    return None if None in found else found[0]


def _perturbed(
    model: nn.Module, example: Example, batch: int, batch_symbol: str, grad: bool, effects: Effects
) -> Observation | None:
    """A real run on inputs with other numbers; None where the model can't be recorded on them."""
    try:
        return observe(model, example, batch, batch_symbol, grad, effects=effects, perturbed=True)
    except Exception:  # the model may refuse numbers that nobody asked it to run on
        return None


def _gives(model: nn.Module, example: Example, batch: int, grad: bool, snapshot: Snapshot) -> Any:
    """What forward gives for these inputs and random numbers of its own, in the state that Python is in; or how it raises."""
    snapshot.save_buffers()
    torch.manual_seed(_OTHER_SEED)
    args, kwargs = tree.unflatten(example.resized(batch), example.spec)
    try:
        with torch.set_grad_enabled(grad):
            output = model(*args, **kwargs)
        return tree.map_leaves(lambda t: own(t.detach()) if isinstance(t, torch.Tensor) else t, output)
    except Exception as error:  # of inputs that nobody asked it to take
        return type(error).__name__
    finally:
        snapshot.restore()


def _given(plan: TracePlan, example: Example) -> dict[str, Given]:
    """The inputs that are neither tensors nor plain values, as they are now, but for what forward itself puts there."""
    handed_in = tree.unflatten(example.leaves, example.spec)
    put = [
        (id(follow(handed_in, s.container)), s.steps[-1] if s.how in ("set", "remove") else None)
        for s in plan.stores
        if s.table == "input"
    ]
    return {name: Given(example.leaves[plan.values[name].origin[0]], put) for name in plan.given}


def _refuse_first_of_many(real: Observation, differs: str | None) -> None:
    """Raise `UnsupportedError` if what forward sets up when it runs first, and uses after, follows from that call's inputs."""
    if differs:
        set_up = [f"{name!r} of {named(path)}" for path, name, _, _ in real.recorded.changed] or [
            "a container or an object"
        ]
        raise UnsupportedError(
            f"forward sets up {', '.join(set_up[:3])} when it first runs, from that call's inputs or random numbers; later calls "
            f"use what it then was ({differs}), and a plan would set it up anew. Run the model once, model(*example_inputs), and "
            "prepare then; or keep such state in a buffer"
        )


def _refuse_leaks(plan: TracePlan, seen: TracePlan) -> None:
    """Raise `UnsupportedError` if forward does something else where the inputs hold other numbers, and no number that it was
    seen to read out of a tensor says why."""
    differs = unexplained(plan, seen)
    if differs:
        raise UnsupportedError(f"{_LEAKS} On inputs with other numbers: {differs}")


_LEAKS = (
    "forward takes data out of torch unseen (by dlpack, a storage, a pointer, deepcopy, or another thread) and brings them back as "
    "a tensor, a number or a branch, which a plan would freeze; keep to torch's own ops, or read numbers by item() or tolist()."
)


def _refuse_unlike_constants(plan: TracePlan, seen: TracePlan) -> None:
    """Raise `UnsupportedError` if tensors that no op made are others where the inputs hold other numbers."""
    pairs = zip(plan.constants.values(), seen.constants.values(), strict=False)
    if len(plan.constants) != len(seen.constants) or not all(difference(a, b) is None for a, b in pairs):
        raise UnsupportedError(f"{_LEAKS} On inputs with other numbers a tensor that no op made is another one")


def _refuse_kept_data(first: TracePlan, again: TracePlan) -> None:
    """Raise `UnsupportedError` if a later run on the same inputs lacks ops of the first that compute from data: their results are
    kept where the model does not reach. What was made from sizes alone may be kept."""
    if _computes(first) != _computes(again):
        raise UnsupportedError(
            "forward keeps what it computed from its inputs for later calls, outside of the model (functools.cache, a closure, an "
            "attribute of a function), which a plan can't follow; keep it in a buffer, or compute it anew"
        )


def _computes(plan: TracePlan) -> list[str]:
    """The ops of a plan whose results follow inputs, state or random numbers."""
    follows = {name for _, name in plan.inputs} | {name for name, value in plan.values.items() if value.is_state}
    found = []
    for node in plan.nodes:
        if node.seeded or not follows.isdisjoint(node.reads):
            follows.update(node.outputs)
            found.append(node.target)
    return found


class Reach:
    """The containers that forward can reach outside of the model and of what it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        self.roots = outside_of(self.modules)

    def snapshot(self, args: Any, kwargs: Any) -> Snapshot:
        """All of it as it is now, to be put back."""
        things = [root.now() for root in self.roots if not root.names]
        found = Snapshot(self.model, (args, kwargs, *(thing for thing in things if thing is not MISSING)))
        for root in self.roots:
            if root.names:
                found.note_variables(root.thing, root.names)
        return found

    def containers(self, args: Any, kwargs: Any) -> Containers:
        """All containers, as they are now, with those in the arguments and in the model."""
        return Containers(self.modules, strays(self.modules), (args, kwargs), self.roots)


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
    beside = stores_beside_caches(sorted(effects.assigned), put)
    stores = (*plan.stores, *beside, *stores_of(effects.rules, changes, put))
    roots = {root.name: root.thing for root in reach.roots}
    objects = {s.path: roots[s.path] for s in stores if s.table == "outside"}
    return check(replace(plan, stores=stores, objects={**plan.objects, **objects}))


def refuse_hooks(model: nn.Module) -> None:
    """Raise `UnsupportedError` if a module has backward hooks, which act through the autograd graph of its own call.

    Or if there is a hook for all modules, which would have to run at other calls than the model's.
    """
    hook = next((hook for hooks in GLOBAL_HOOKS for hook in hooks.values()), None)
    if hook is not None:
        counter = hook not in global_hooks()
        todo = (
            "capture outside of FlopCounterMode, and count calls of the split alone" if counter else "remove it first"
        )
        raise UnsupportedError(
            f"a global module hook is registered ({hook!r}, by torch.nn.modules.module.register_module_...), which would run while "
            f"the model is captured, and a captured plan does not run; {todo}"
        )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedError(
                f"{named(path)} has a backward hook, which a captured plan can't run; remove it, or register a hook on a "
                "parameter or on an output of the split instead"
            )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _at_batch_1(
    model: nn.Module,
    example: Example,
    plan: TracePlan,
    batches: range,
    grad: bool,
    recordings: list[Recording],
    effects: Effects,
) -> tuple[TracePlan, list[Evidence]]:
    """Batch 1 takes paths of its own (sizes of 1 broadcast): it is covered if a real run does what the plan says."""
    if 1 not in batches or plan.traced_batch == 1 or plan.captured_by == "observed-per-batch":
        return plan, []
    one = Batches.of([1])
    try:
        seen = observe(model, example, 1, plan.batch_symbol, grad, effects=effects)
        differs = _differs(plan, seen)
    except Exception as error:  # the model itself may refuse one sample; it will say so again when it is asked to
        differs = _first_line(error)
    if differs:
        return replace(plan, batches=plan.batches - one, excluded=(*plan.excluded, f"batch 1: {differs}")), []
    recordings.append(seen.recorded)
    plan = _assuming(plan, seen.plan.assumption)
    return replace(plan, batches=plan.batches | one), [seen.evidence]


def _assuming(plan: TracePlan, *others: Assumption) -> TracePlan:
    """The plan with what forward looked at in further runs that it rests on."""
    found = plan.assumption
    for other in others:
        changes = {
            field.name: getattr(other, field.name)
            for field in fields(Assumption)
            if field.name != "switches"
            and getattr(found, field.name) in (None, False)
            and getattr(other, field.name) is not None
        }
        found = replace(found, **changes)
    return replace(plan, assumption=found)


def _observed(
    model: nn.Module,
    example: Example,
    batch_symbol: str,
    batches: range,
    grad: bool,
    real: Observation,
    reasons: list[tuple[str, str]],
    recordings: list[Recording],
    plain: bool,
) -> TracePlan:
    here = real.plan.traced_batch
    above = range(max(2, batches.start), batches.stop)
    for start in dict.fromkeys((2, here)):
        sizes = [b for b in (start, start + 1, start + 3) if b in batches and b > 1]
        at = min(max(start, above.start), above.stop - 1)
        pool = range(max(above.start, at - 4), min(above.stop, at + 5))
        near = sorted((b for b in pool if b not in sizes), key=lambda b: abs(b - start))
        sizes = sorted([*sizes, *near[: 3 - len(sizes)]])
        try:
            if not sizes:
                raise Disagreement("the range holds no batch above 1 to compare runs at")
            runs = [
                real if b == here else observe(model, example, b, batch_symbol, grad, effects=real.effects)
                for b in sizes
            ]
            plan = check(prune(_as_far_as_shown(model, example, runs, batches, plain)))
            plan = _assuming(plan, *(r.plan.assumption for r in runs))
            if here in plan.batches or here == 1:
                recordings += [r.recorded for r in runs if r is not real]
                return plan
        except CaptureError as error:
            reasons.append(("observed", str(error)))
        except Exception as error:  # the model may refuse a size that nobody asked it to run
            reasons.append(("observed", _first_line(error)))
    return at_batch(real.plan, here)


def _of_runs(runs: Sequence[Observation]) -> tuple[TracePlan, str]:
    """The plan of these runs, and where forward may have learnt of its batch what it will not be asked again, in words.

    It has the ops whose results nothing uses, since at another batch they may be unable to run, if they are alike in all runs.
    Sizes lead to questions, which are followed elsewhere. A number that Python read out of a tensor leads to none: at another
    batch it may be another, and so may what is then done.
    """
    sizes = Batches.of(r.plan.traced_batch for r in runs)
    loose = runs[0].unpruned.definitions.keys() - runs[0].plan.definitions.keys()
    read = [[n.witness for n in r.unpruned.nodes if n.is_witness and not _is_unforeseen(r, n)] for r in runs]
    if any(not tree.identical(read[0], others) for others in read[1:]):
        return generalize([r.plan for r in runs], sizes), "a number that it reads out of a tensor follows the batch"
    try:
        plan = generalize([r.unpruned for r in runs], sizes, loose)
    except Disagreement as error:
        return generalize([r.plan for r in runs], sizes), f"ops whose results nothing uses differ: {error}"
    if any(r.recorded.raised for r in runs):
        return plan, "it goes on after an op has raised, which may follow the batch"
    for node in plan.nodes:
        unknown = [n for n in node.reads if n in loose and plan.values[n].dtype is not runs[0].unpruned.values[n].dtype]
        if unknown:
            return plan, f"an op reads {unknown[0]!r}, whose sizes follow the batch in no way that is known"

    def made_from_the_batch(node: TraceNode) -> bool:
        sizes = (d for n in node.outputs for d in plan.values[n].shape)
        return plan.batch_symbol in node.reads or any(isinstance(d, Expr) for d in sizes)

    if any(node.is_witness for node in plan.nodes):
        kept = {id(node) for node in prune(plan).nodes}
        for i in sorted(reached(plan, Groups(plan), (), made_from_the_batch)):
            node = plan.nodes[i]
            if node.is_witness and id(node) not in kept and not _is_unforeseen(runs[0], node):
                return plan, f"a number that it reads ({node.target}) is made from the batch"
    return plan, ""


def _is_unforeseen(run: Observation, node: TraceNode) -> bool:
    """Whether it is a size of which nothing tells whether it follows data: what is asked of it is followed, as of other sizes."""
    return not run.unforeseen.isdisjoint(node.outputs)


def _as_far_as_shown(
    model: nn.Module, example: Example, runs: Sequence[Observation], batches: range, plain: bool
) -> TracePlan:
    """The observed plan for all batches at which forward would have branched as it did, read from what it asks of sizes.

    Where that can't be followed, only for the batches that were run. `plain`: it was seen to make a plain number of one.
    """
    plan, why = _of_runs(runs)
    why = why or ("it makes a plain number of its batch" if plain else "")
    wanted, shown = _above_1(batches), Batches.of(r.plan.traced_batch for r in runs)
    excluded: list[str] = []
    others = wanted - shown
    if others and not why:
        others, excluded, why = _where_watched(model, example, plan, runs, others)
    if others and why:
        excluded.append(f"batch {others}: {why}")
        others = Batches(())
    held = others | (shown & wanted)
    return within_shapes(replace(plan, batches=held, excluded=tuple(excluded)), shown)


def _where_watched(
    model: nn.Module, example: Example, plan: TracePlan, runs: Sequence[Observation], wanted: Batches
) -> tuple[Batches, list[str], str]:
    """Those of the batches at which forward, by what it does with followed sizes, runs the plan; why not others; or why none knows.

    Every number of the plan that follows the batch must be seen to do so, and be the plan's at each of them.
    """
    batch, symbol = runs[0].plan.traced_batch, plan.batch_symbol
    sources = size_sources([r.shapes for r in runs], [r.plan.traced_batch for r in runs], symbol)
    if sources is None:
        return wanted, [], "how many tensors or dims an op makes follows it"
    watch = Watch(sources=sources)
    try:
        again = observe(model, example, batch, symbol, plan.grad_enabled, watch, runs[0].effects).plan
        differs = disagreement(prune(plan), evaluated(again))
    except (ReadError, Exception) as error:  # whatever forward raises where a size is no int
        differs = _first_line(error)
    if watch.lost or differs:
        return wanted, [], f"forward computes with its batch in a way that can't be followed ({watch.lost or differs})"
    kept, excluded = holding(watch, symbol, wanted)
    for ours, theirs in dict.fromkeys(expressed(prune(plan), again)):
        if not isinstance(theirs, Expr):
            return (
                wanted,
                [],
                f"forward computes with its batch in a way that can't be followed ({ours} comes from nowhere)",
            )
        same = where(Expr(f"({ours}) == ({theirs})"), symbol, True, kept)
        if same != kept:
            excluded.append(f"batch {kept - same}: the runs show {ours}, and forward computes {theirs}")
            kept = same
    return kept, excluded, ""


def _above_1(batches: range) -> Batches:
    return Batches.of(range(max(2, batches.start), batches.stop))


def observe(
    model: nn.Module,
    example: Example,
    batch: int,
    batch_symbol: str,
    grad: bool,
    watch: Watch | None = None,
    effects: Effects | None = None,
    perturbed: bool = False,
) -> Observation:
    """Run the forward on real tensors of this batch: the plan of that run, all its numbers as they were, and the output.

    With a `watch`, sizes that follow the batch note what is asked of them. Without `effects`, of an earlier observation, the model
    runs once more in the state that the first run left Python in, and must give the same: what it does to containers in both runs
    is no cache; and again on other inputs, if that state is not as it was. A function under `torch.jit.script` may round in another
    way once it is warm: then the model runs until it gives the same twice, and that is the output.
    """
    leaves = example.resized(batch, perturbed)
    reach = Reach(model)
    args, kwargs = tree.unflatten(leaves, example.spec)
    snapshot = reach.snapshot(args, kwargs)
    snapshot.save_buffers()
    state = state_tensors(snapshot)
    containers = reach.containers(args, kwargs)
    found: Recording | None = None
    try:
        if watch is not None:
            for i in example.batched:
                watch.tell(leaves[i], (batch_symbol, *(None,) * (leaves[i].dim() - 1)))
        with torch.set_grad_enabled(grad), recording(model, None, snapshot, watch) as (found, _):
            found.output = model(*args, **kwargs)
        found.effects = containers.changes()
        _refuse_python_state(found, snapshot)
        low = Lowering(model, found, snapshot, state, leaves, example.batched, None, batch_symbol, {})
        unpruned = low.plan(example.spec, batch, Batches(((batch, batch),)), "observed", grad)
        changes, put, unforeseen = dict(found.effects), low.put, frozenset(low.unforeseen)
        del low
        output = tree.map_leaves(lambda t: own(t.detach()) if isinstance(t, torch.Tensor) else t, found.output)
        shapes = tuple(tuple(sizes_in(t) for t in tensors_in(e.out)) for e in found.events)
        found.forget_tensors()
        first, attributes = effects is None, {}
        for left in reversed(range(_UNTIL_WARM if found.scripted else first)):
            found.output = None
            snapshot.again(found.drew)
            args, kwargs = tree.unflatten(example.resized(batch, perturbed), example.spec)
            containers = reach.containers(args, kwargs)
            attributes = attributes_of(snapshot.modules)
            with torch.set_grad_enabled(grad):
                now = model(*args, **kwargs)
            differs = difference(output, now)
            if not differs:
                break
            if left:
                output = tree.map_leaves(lambda t: own(t.detach()) if isinstance(t, torch.Tensor) else t, now)
            else:
                raise UnsupportedError(
                    f"forward gives another result when it runs again on the same input with the same random numbers ({differs}): "
                    "it keeps state in Python, draws from a generator of its own, or is not deterministic. Keep state in buffers, "
                    "and draw from torch's RNG"
                )
        later = None
        if effects is None:
            effects = effects_of(changes, containers.changes())
            effects.assigned = {
                key
                for key, value in attributes_of(snapshot.modules).items()
                if attributes.get(key, MISSING) is not value and not _alike(attributes.get(key), value)
            }
            _refuse_renewed(found, effects)
        unpruned = with_stores(unpruned, effects, changes, put, reach)
        plan = check(prune(unpruned))
        if first and (found.changed or found.containers or changes):
            snapshot.again()
            later = _gives(model, example.turned(), batch, grad, snapshot)
        return Observation(plan, unpruned, Evidence(batch, output), shapes, found, unforeseen, effects, later)
    finally:
        snapshot.restore(found is None or (found.drew and not found.disturbed))


def _alike(a: Any, b: Any) -> bool:
    return simple(a) and simple(b) and tree.identical(a, b)


def _refuse_renewed(found: Recording, effects: Effects) -> None:
    """Raise `UnsupportedError` for an attribute that forward reads and changes in the second run, too: it is no cache."""
    for path, name, _, _ in found.changed:
        if (path, name) in effects.assigned and (path, name) in found.read_attributes:
            raise UnsupportedError(
                f"forward reads and changes the attribute {name!r} of {named(path)} at every call, which a plan can't follow; "
                "return what it keeps there, or keep it in a buffer"
            )


def _refuse_python_state(found: Recording, snapshot: Snapshot) -> None:
    if found.disturbed:
        raise UnsupportedError(
            "another thread drew from torch's random generator while forward, which draws too, was captured: which numbers are "
            "whose can't be told. Prepare, and call each new batch size once, while no other thread draws"
        )
    mine = found.drew_python or threading.active_count() == 1  # else it was another thread that drew
    moved = [name for name in snapshot.moved_rng() if mine or name != "random"]
    if moved:
        found.drew = True
        raise UnsupportedError(
            f"forward draws from {' and '.join(moved)}, whose numbers would be frozen in the plan; draw from torch's RNG instead"
        )
    for path, name, what in snapshot.registered():
        raise UnsupportedError(
            f"forward registers, replaces or removes the {what} {name!r} of {named(path)}, which no plan does; if it does so "
            "when it runs first, run the model once, model(*example_inputs), and prepare then"
        )
    for before, now in found.containers:
        counted = [(a, b) for a, b in zip(before, now, strict=False) if isinstance(a, (bool, int, float)) and a != b]
        if counted:
            raise UnsupportedError(
                f"forward changes a number that the model keeps in a container or an object (from {counted[0][0]!r} to "
                f"{counted[0][1]!r}), which a plan can't follow; keep such state in a buffer"
            )
    for path, name, before, now in found.changed:
        if before is None and (path, name) in found.read_attributes:
            before = found.read_attributes[path, name][1]  # what the class has stood for it
        counts = isinstance(before, (bool, int, float)) and before != now
        keeps = isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)
        if (path, name) in found.read_attributes and (counts or keeps):
            if keeps:
                before, now = "one tensor", "another"
            raise UnsupportedError(
                f"forward reads and changes the attribute {name!r} of {named(path)} (from {before!r} to {now!r}), which "
                "a plan can't follow; keep such state in a buffer"
            )


def symbolic(model: nn.Module, example: Example, batch_symbol: str, batches: range, grad: bool, effects: Effects,
             recordings: list[Recording] | None = None) -> TracePlan:  # fmt: skip
    """Run the forward on fake tensors whose batch is a symbol; the plan holds for batches that meet every guard.

    What it read of the model's Python state is added to `recordings`, as far as that can't be something fake.
    """
    shapes = Sizes()
    fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    size = max(example.batch, 2)
    leaves = example.resized(size)
    reach = Reach(model)
    inputs: list[Any] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            inputs.append(leaf)
            continue
        inputs.append(symbolic_batch(fake, leaf, f"x{i}", i in example.batched))
    symbol = inputs[example.batched[0]].shape[0].node.expr
    args, kwargs = tree.unflatten(inputs, example.spec)
    snapshot = reach.snapshot(args, kwargs)
    state = state_tensors(snapshot)
    containers = reach.containers(args, kwargs)
    try:
        with torch.set_grad_enabled(grad), recording(model, fake, snapshot) as (found, recorder):
            shapes.recorder = recorder
            found.output = model(*args, **kwargs)
        shapes.recorder = None
        found.effects = containers.changes()
        if found.read_size:  # and it caught the error
            raise PlainNumberError(found.read_size)
        low = Lowering(
            model, found, snapshot, state, inputs, example.batched, fake, batch_symbol, {symbol: batch_symbol}
        )
        plan = low.plan(example.spec, size, _above_1(batches), "symbolic", grad)
        plan = with_stores(plan, effects, found.effects, low.put, reach)
        if recordings is not None:
            found.forget_tensors()
            found.read_attributes = {k: read for k, read in found.read_attributes.items() if simple(read[1])}
            recordings.append(found)
    finally:
        snapshot.restore(False)  # no fake tensor draws
    of_ops = shapes.asked("op", symbol, batch_symbol)
    plan = within_questions(plan, shapes.asked("forward", symbol, batch_symbol))
    if found.raised:  # forward went on: with another answer the op may not raise
        plan = within_questions(plan, of_ops)
    plan = within_shapes(plan, Batches.of([size]), of_ops)
    # Only now: at a batch at which an op can't run, forward raises, even if nothing uses its result.
    return check(prune(plan))
