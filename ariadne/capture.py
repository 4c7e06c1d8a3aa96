"""Capture: from a model and example inputs to a plan, by the first way that serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ariadne import tree
from ariadne.baseline import GLOBAL_HOOKS, Baseline
from ariadne.errors import CaptureError, UnsupportedError, named
from ariadne.example import Captured, Evidence, Example
from ariadne.expr import Expr
from ariadne.generalize import (
    Disagreement,
    at_batch,
    disagreement,
    generalize,
    size_sources,
    with_views_of,
    without_slices_of_all,
)
from ariadne.lower import Lowering, state_tensors
from ariadne.plan import Assumption, Batches, TraceNode, TracePlan, check
from ariadne.prune import Groups, prune, reached
from ariadne.recorder import Recording, recording, simple, tensors_in
from ariadne.refusals import refuse_scripted
from ariadne.shapes import PlainNumberError, Sizes, symbolic_batch, within_questions, within_shapes
from ariadne.sizes import Watch, holding
from ariadne.state import Snapshot
from ariadne.strided import own
from ariadne.verify import difference


@dataclass(frozen=True)
class Observation:
    """One recorded real run: its plan, its output, and the shapes of what each recorded op made.

    `unpruned`: the plan with the ops whose results nothing uses, which may be unable to run at another batch.
    """

    plan: TracePlan
    unpruned: TracePlan
    evidence: Evidence
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    recorded: Recording


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
    reasons: list[tuple[str, str]] = []
    refuse_hooks(model)
    refuse_scripted(model)
    real = observe(model, example, size, batch_symbol, grad, twice=True)
    plan: TracePlan | None = None
    plain = False  # of a size, forward was seen to make a plain number
    others: list[Recording] = []  # what the plan rests on besides the run at the example's batch
    if like is not None and size == example.batch and not disagreement(like, real.plan):
        plan, batches = at_batch(real.plan, size), range(size, size + 1)
        reasons = [*like.not_captured_by]
    else:
        try:
            plan = symbolic(model, example, batch_symbol, batches, grad, others)
        except UnsupportedError as error:
            plain = isinstance(error, PlainNumberError)
            reasons.append(("symbolic", str(error)))
        except Exception as error:  # whatever torch's fake tensors raise: the next way runs real ones
            reasons.append(("symbolic", _first_line(error)))
    if plan is not None and plan.captured_by == "symbolic":
        plan = without_slices_of_all(plan, real.plan)
        differs = disagreement(plan, real.plan) if size in plan.batches else f"batch {size} is not covered"
        if differs:
            reasons.append(("symbolic", f"not what a real run does: {differs}"))
            plan, others = None, []
        else:
            plan = with_views_of(plan, real.plan)
    if plan is None or _above_1(batches) - plan.batches:
        ran: list[Recording] = []
        seen = _observed(model, example, batch_symbol, batches, grad, real, reasons, ran, plain)
        if plan is None or len(seen.batches) > len(plan.batches):
            if plan is not None:
                reasons.insert(0, ("symbolic", "; ".join(plan.excluded)))
            plan, others = seen, ran
    plan, more = _at_batch_1(model, example, plan, batches, grad, others)
    if needed and example.batch not in plan.batches:
        reasons.append((plan.captured_by, "; ".join(plan.excluded)))
        plan, more, others = at_batch(real.plan, example.batch), [], []
    plan, recordings = replace(plan, not_captured_by=tuple(reasons)), [real.recorded, *others]
    if grad and plan.assumption.grad is None:
        other = observe(model, example, size, batch_symbol, False)
        recordings.append(other.recorded)
        if size in plan.batches and disagreement(plan, other.plan):
            plan = replace(plan, assumption=replace(plan.assumption, grad=True))
    if plan.constants and not any(node.is_witness for node in plan.nodes):
        _refuse_leaks(plan, observe(model, example, size, batch_symbol, grad, perturbed=True).plan)
    return Captured(check(plan), (real.evidence, *more), Baseline(model, recordings))


def _refuse_leaks(plan: TracePlan, seen: TracePlan) -> None:
    """Raise `UnsupportedError` if a tensor that no op made is another one where the inputs hold other numbers."""
    pairs = zip(plan.constants.values(), seen.constants.values(), strict=False)
    same = len(plan.constants) == len(seen.constants) and all(
        a.shape == b.shape and a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs
    )
    if not same:
        raise UnsupportedError(
            "forward takes data out of torch and brings them back in as a tensor (by numpy, dlpack, deepcopy, or another "
            "thread), which a plan would freeze; keep to torch's own ops"
        )


def refuse_hooks(model: nn.Module) -> None:
    """Raise `UnsupportedError` if a module has backward hooks, which act through the autograd graph of its own call.

    Or if there is a hook for all modules, which would have to run at other calls than the model's.
    """
    if any(GLOBAL_HOOKS):
        raise UnsupportedError(
            "a global module hook is registered (torch.nn.modules.module.register_module_...), which a captured plan does not run; "
            "remove it first"
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
    model: nn.Module, example: Example, plan: TracePlan, batches: range, grad: bool, recordings: list[Recording]
) -> tuple[TracePlan, list[Evidence]]:
    """Batch 1 takes paths of its own (sizes of 1 broadcast): it is covered if a real run does what the plan says."""
    if 1 not in batches or plan.traced_batch == 1 or plan.captured_by == "observed-per-batch":
        return plan, []
    one = Batches.of([1])
    try:
        seen = observe(model, example, 1, plan.batch_symbol, grad)
        differs = disagreement(plan, seen.plan)
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
            if getattr(found, field.name) in (None, False) and getattr(other, field.name) is not None
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
            runs = [real if b == here else observe(model, example, b, batch_symbol, grad) for b in sizes]
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
    read = [[n.witness for n in r.unpruned.nodes if n.is_witness] for r in runs]
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
            if node.is_witness and id(node) not in kept:
                return plan, f"a number that it reads ({node.target}) is made from the batch"
    return plan, ""


def _as_far_as_shown(
    model: nn.Module, example: Example, runs: Sequence[Observation], batches: range, plain: bool
) -> TracePlan:
    """The observed plan for all batches at which forward would have branched as it did, read from what it asks of sizes.

    Where that can't be followed, only for the batches that were run. `plain`: it was seen to make a plain number of one.
    """
    plan, why = _of_runs(runs)
    why = why or ("it makes a plain number of its batch" if plain else "")
    wanted, shown = _above_1(batches), Batches.of(r.plan.traced_batch for r in runs)
    sources = size_sources([r.shapes for r in runs], list(shown), plan.batch_symbol)
    excluded: list[str] = []
    lost = True
    if sources is not None:
        watch = Watch(sources)
        again = observe(model, example, shown.ranges[0][0], plan.batch_symbol, plan.grad_enabled, watch)
        differs = disagreement(prune(plan), again.plan)
        if differs:
            raise Disagreement(f"the same batch run twice differs: {differs}")
        lost = watch.lost or bool(why)
        wanted, excluded = holding(watch, plan.batch_symbol, wanted)
    if lost:
        others = wanted - shown
        if others:
            unlike = "how many tensors or dims an op makes follows it" if sources is None else ""
            told = why or unlike or "forward computes with its batch in a way that can't be followed"
            excluded.append(f"batch {others}: {told}")
        wanted &= shown
    if shown - wanted:
        raise Disagreement(f"forward branches on its batch: {'; '.join(excluded)}")
    return within_shapes(replace(plan, batches=wanted, excluded=tuple(excluded)), shown)


def _above_1(batches: range) -> Batches:
    return Batches.of(range(max(2, batches.start), batches.stop))


def observe(
    model: nn.Module,
    example: Example,
    batch: int,
    batch_symbol: str,
    grad: bool,
    watch: Watch | None = None,
    twice: bool = False,
    perturbed: bool = False,
) -> Observation:
    """Run the forward on real tensors of this batch: the plan of that run, all its numbers as they were, and the output.

    With a `watch`, sizes that follow the batch note what is asked of them. With `twice` the model runs once more in the state
    that the first run left Python in, and must give the same.
    """
    leaves = example.resized(batch, perturbed)
    snapshot = Snapshot(model)
    snapshot.save_buffers()
    state = state_tensors(snapshot)
    args, kwargs = tree.unflatten(leaves, example.spec)
    try:
        if watch is not None:
            for i in example.batched:
                watch.tell(leaves[i], (batch_symbol, *(None,) * (leaves[i].dim() - 1)))
        with torch.set_grad_enabled(grad), recording(model, None, snapshot, watch) as (found, _):
            found.output = model(*args, **kwargs)
        _refuse_python_state(found, snapshot)
        low = Lowering(model, found, snapshot, state, leaves, example.batched, None, batch_symbol, {})
        unpruned = low.plan(example.spec, batch, Batches(((batch, batch),)), "observed", grad)
        plan = check(prune(unpruned))
        output = tree.map_leaves(lambda t: own(t.detach()) if isinstance(t, torch.Tensor) else t, found.output)
        shapes = tuple(tuple(tuple(t.shape) for t in tensors_in(e.out)) for e in found.events)
        found.forget_tensors()
        if twice:
            found.output = None
            snapshot.again()
            args, kwargs = tree.unflatten(example.resized(batch), example.spec)
            with torch.set_grad_enabled(grad):
                differs = difference(output, model(*args, **kwargs))
            if differs:
                raise UnsupportedError(
                    f"forward gives another result when it runs again on the same input with the same random numbers ({differs}): "
                    "it keeps state in Python, draws from a generator of its own, or is not deterministic. Keep state in buffers, "
                    "and draw from torch's RNG"
                )
        return Observation(plan, unpruned, Evidence(batch, output), shapes, found)
    finally:
        snapshot.restore()


def _refuse_python_state(found: Recording, snapshot: Snapshot) -> None:
    moved = snapshot.moved_rng()
    if moved:
        raise UnsupportedError(
            f"forward draws from {' and '.join(moved)}, whose numbers would be frozen in the plan; draw from torch's RNG instead"
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


def symbolic(model: nn.Module, example: Example, batch_symbol: str, batches: range, grad: bool,
             recordings: list[Recording] | None = None) -> TracePlan:  # fmt: skip
    """Run the forward on fake tensors whose batch is a symbol; the plan holds for batches that meet every guard.

    What it read of the model's Python state is added to `recordings`, as far as that can't be something fake.
    """
    shapes = Sizes()
    fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    size = max(example.batch, 2)
    leaves = example.resized(size)
    snapshot = Snapshot(model)
    state = state_tensors(snapshot)
    inputs: list[Any] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            inputs.append(leaf)
            continue
        inputs.append(symbolic_batch(fake, leaf, f"x{i}", i in example.batched))
    symbol = inputs[example.batched[0]].shape[0].node.expr
    args, kwargs = tree.unflatten(inputs, example.spec)
    try:
        with torch.set_grad_enabled(grad), recording(model, fake, snapshot) as (found, recorder):
            shapes.recorder = recorder
            found.output = model(*args, **kwargs)
        shapes.recorder = None
        low = Lowering(
            model, found, snapshot, state, inputs, example.batched, fake, batch_symbol, {symbol: batch_symbol}
        )
        plan = low.plan(example.spec, size, _above_1(batches), "symbolic", grad)
        if recordings is not None:
            found.forget_tensors()
            found.read_attributes = {k: read for k, read in found.read_attributes.items() if simple(read[1])}
            recordings.append(found)
    finally:
        snapshot.restore()
    of_ops = shapes.asked("op", symbol, batch_symbol)
    plan = within_questions(plan, shapes.asked("forward", symbol, batch_symbol))
    if found.raised:  # forward went on: with another answer the op may not raise
        plan = within_questions(plan, of_ops)
    plan = within_shapes(plan, Batches.of([size]), of_ops)
    # Only now: at a batch at which an op can't run, forward raises, even if nothing uses its result.
    return check(prune(plan))
