"""Capture: from a model and example inputs to a plan, by the first way that serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture.beside import Ranging, differs_from, first_line, held_against, over_sizes
from ariadne.capture.example import Captured, Evidence, Example
from ariadne.capture.first import emptied, filled_again, filled_before
from ariadne.capture.flags import set_again
from ariadne.capture.followed import ReadError
from ariadne.capture.generalize import (
    Disagreement,
    at_batch,
    disagreement,
    evaluated,
    expressed,
    generalize,
    size_sources,
    unexplained,
)
from ariadne.capture.history import another, gives, standing
from ariadne.capture.leaks import refuse_kept_data, refuse_leaks, refuse_unlike_constants
from ariadne.capture.lively import differs_by_state, refuse_paths_beside
from ariadne.capture.observed import Observation, observe, refuse_layouts
from ariadne.capture.ran import Answer, by_results_alone
from ariadne.capture.reach import Reach
from ariadne.capture.recorder import is_opened, opened
from ariadne.capture.refusals import (
    refuse_cached_weights,
    refuse_called_class,
    refuse_function_modes,
    refuse_hooks,
    refuse_scripted,
)
from ariadne.capture.settled import NO_BATCH, refuse_beginnings, refuse_change, refuse_flags, refuse_questions
from ariadne.capture.shapes import PlainNumberError, within_shapes
from ariadne.capture.sizes import Watch, holding
from ariadne.capture.symbolic import above_1, symbolic
from ariadne.capture.values import SavedByOpError
from ariadne.errors import AriadneError, CaptureError, UnsupportedError, named
from ariadne.guards import (
    Baseline,
    Effects,
    Given,
    Recording,
    follow,
    in_order,
    refusal,
    switches,
)
from ariadne.imports import imported
from ariadne.plan import (
    Assumption,
    Batches,
    Expr,
    Groups,
    TraceNode,
    TracePlan,
    check,
    layout,
    prune,
    reached,
    sizes_in,
    where,
)

_MOST_OPS = 5000  # that a run on other numbers may take, beside twenty for each of the plan's
_MOST_TRIED = 64  # the largest batch at which a flag of the first call is put to the test
TYPED_CLASSES = frozenset(name for name in dir(torch) if name.endswith("Tensor") and name != "Tensor")


def capture(
    model: nn.Module, example: Example, *, batch_symbol: str, batches: range, grad: bool, needed: bool = False,
    like: TracePlan | None = None, stood: bool = False, beside: Sequence[tuple[Example, bool]] = (),
) -> Captured:  # fmt: skip
    """The plan of the model's forward on inputs like `example`, for as many of `batches` as it can be shown to hold for.

    Tried in this order: symbolic; observed at several batch sizes; observed at the example's batch alone. Whatever made
    the plan, real runs at the example's batch and at batch 1 are held against it, op by op. `grad`: gradients enabled.
    `needed`: the plan must serve the example's own batch, be it that batch alone. `like`: a plan of other batches; where a real
    run does what it says, that run is the plan of the example's batch, and nothing else is tried. `stood`: training flags that
    forward sets stand otherwise already. `beside`: examples that led to plans of other paths, and whether forward
    keeps something on these.

    Raises `UnsupportedError` where forward does something that no plan can hold, and what the model raises itself.
    """
    imported("torch._inductor.config")  # by torch itself in the midst of a first recording, with all of its compilers
    batches = example.within(batches)
    size = example.batch if example.batch in batches else max(batches.start, min(2, batches.stop - 1))
    refuse_hooks(model)
    refuse_scripted(model)
    refuse_cached_weights(model)
    refuse_function_modes()
    refuse_layouts(model, example)
    other = another(size, batches)
    try:
        real = observe(model, example, size, batch_symbol, grad, other=other)
    except SavedByOpError as error:
        if is_opened():
            raise UnsupportedError(str(error)) from None
        with opened():
            return capture(
                model,
                example,
                batch_symbol=batch_symbol,
                batches=batches,
                grad=grad,
                needed=needed,
                like=like,
                stood=stood,
                beside=beside,
            )
    except AriadneError:
        raise
    except Exception as error:
        refuse_called_class(error)
        if size == example.batch:
            raise  # the model's own
        raise CaptureError(
            f"the example's batch, {example.batch}, lies outside of dynamic_batch {batches.start, batches.stop - 1}, and on its "
            f"inputs cut or repeated to batch {size} forward raises {type(error).__name__}: {str(error)[:200].rstrip('.')}. Give "
            "an example whose batch lies in the range. The batch is dim 0 of the first tensor, and of each other of that size there"
        ) from error
    with by_results_alone(real.recorded.scripted):
        captured = _followed(model, example, real, other, batch_symbol, batches, grad, needed, like, stood)
    if not captured.plan.questions:
        return captured
    keeps = _keeps(real, captured.plan)
    others = [one for one, too in beside if keeps or too]
    refuse_paths_beside(model, example, others, grad, real.recorded.drew, _most(real))
    return replace(captured, keeps=keeps)


def _keeps(real: Observation, plan: TracePlan) -> bool:
    """Whether forward leaves something in Python that the plan does not put there, and that is not made of the model alone."""
    put, made = _put(real, plan)
    places = real.effects.known - real.effects.rules.keys()
    if any((place.path, *place.steps[:1]) not in made for place in places):
        return True
    return any((path, name) not in put for path, name, *_ in real.recorded.changed)


def _put(real: Observation, plan: TracePlan) -> tuple[set[Any], set[Any]]:
    """The attributes that the plan sets, or that hold what is made of the model alone; and those of the second kind."""
    made: set[Any] = {(one.spot.path, *one.spot.steps[:1]) for one in (real.recorded.made_of or {}).values()}
    return made.union((store.path, store.name) for store in plan.stores), made


def _followed(
    model: nn.Module, example: Example, real: Observation, other: int, batch_symbol: str, batches: range, grad: bool,
    needed: bool, like: TracePlan | None, stood: bool,
) -> Captured:  # fmt: skip
    """The plan by what a run showed, in the state that is a first call's."""
    size, modules = real.evidence.batch, dict(model.named_modules())
    flags = [*set_again(real.recorded, modules)]
    if flags and stood:
        refuse_change(flags[0][:2], *flags[0][2:])
    if flags or real.primed:
        holders = [(modules[path], name, NO_BATCH) for path, name in real.primed]
        with standing([*holders, *((modules[path], name, other) for path, name, other, _ in flags)]):
            return capture(
                model, example, batch_symbol=batch_symbol, batches=batches, grad=grad, needed=needed, like=like,
                stood=bool(flags),
            )  # fmt: skip
    if real.settled:
        _refuse_unsettled(model, example, grad, real, other, batches)
    refuse_beginnings(model, example, grad, real.beginnings, real.recorded.drew)
    slots = filled_again(
        filled_before(modules, real.recorded),
        lambda asked: _gives_now(model, example, size, grad, real, asked),
    )
    if slots:
        had = {(id(module), name): module.__dict__[name] for (module, name), _ in slots}
        with emptied(slots):
            fresh = _as_first(model, example, size, batch_symbol, grad, other)
            if fresh is not None and _sets_up(model, example, fresh, grad) is None:
                paths = {id(module): path for path, module in modules.items()}
                slotted = {(paths[id(module)], name): had[id(module), name] for (module, name), _ in slots}
                fresh.recorded.called_before = frozenset(slotted)
                fresh.recorded.stood = _stood(fresh, slotted)
                return _captured(model, example, fresh, batch_symbol, batches, grad, needed, like)
    primed = [slot for at, slot in real.history.renewed.items() if at in real.effects.primed] if real.history else []
    if primed:  # it ran at this batch before, and what it puts there at each call stood there already
        with standing(primed):
            again = observe(model, example, size, batch_symbol, grad, other=other)
            if again.effects.primed:
                raise refusal(again.effects.primed[0][0], "changes in a way of its own")
            _refuse_first_of_many(again, _sets_up(model, example, again, grad))
            return _captured(model, example, again, batch_symbol, batches, grad, needed, like)
    _refuse_first_of_many(real, _sets_up(model, example, real, grad))
    return _captured(model, example, real, batch_symbol, batches, grad, needed, like)


def _stood(fresh: Observation, slotted: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """What stood in the slots that were emptied, and in other attributes that the run then filled, too, but for those that each
    call assigns, or one at another batch."""
    filled = {(path, name): before for path, name, before, _ in fresh.recorded.changed if before is not None}
    by_calls = fresh.effects.assigned | fresh.effects.settled | fresh.effects.kept
    by_calls |= {(place.path, place.steps[0]) for place in fresh.effects.rules if place.table == "held" and place.steps}
    return {key: value for key, value in (filled | {**slotted}).items() if key not in by_calls}


def _as_first(
    model: nn.Module, example: Example, size: int, batch_symbol: str, grad: bool, other: int
) -> Observation | None:
    """A run of a model from which was taken what an earlier call filled; None where it goes on with what that run begins."""
    try:
        fresh = observe(model, example, size, batch_symbol, grad, other=other)
        refuse_beginnings(model, example, grad, fresh.beginnings, fresh.recorded.drew)
    except UnsupportedError:  # as it stands, the model was seen to be followed
        return None
    return fresh


def _refuse_unsettled(
    model: nn.Module, example: Example, grad: bool, real: Observation, other: int, batches: range
) -> None:
    """Raise `UnsupportedError` if a result may follow an attribute that forward reads and changes."""
    size = real.evidence.batch
    tried = {size, other, *(b for b in (1, 2, 2 * size, min(batches.stop - 1, _MOST_TRIED)) if b in batches)}
    refuse_questions(model, example, grad, real.settled, (size, other), real.recorded.drew)
    refuse_flags(model, example, grad, real.settled, sorted(tried), real.recorded.drew)


def _sets_up(model: nn.Module, example: Example, real: Observation, grad: bool) -> str | None:
    """What a later call gives otherwise for what the first had left in Python, if that follows from that call's inputs."""
    if real.carried:
        return f"{real.carried[0]} goes into the result"
    history = real.history
    if history is None or not history.moved:
        return None
    args, kwargs = tree.unflatten(example.leaves, example.spec)
    for batch, later in history.later.items():
        snapshot = Reach(model).snapshot(args, kwargs)
        snapshot.save_written(real.plan)
        snapshot.save_buffers()
        try:
            differs = gives(model, example.turned(), batch, grad, real.recorded.drew, snapshot).differs(later)
        finally:
            snapshot.restore(real.recorded.drew)
        if differs:
            return differs
    recorded, (put, _) = real.recorded, _put(real, real.plan)
    changed = {(path, name) for path, name, *_ in recorded.changed}
    asked = changed & (recorded.read_attributes.keys() | recorded.missing)
    if not (real.effects.known or changed - put or asked or real.settled or real.beginnings):
        return None  # it sets attributes, as the plan does, of which this path asks nothing
    lively = (example.lively(1), example.lively(-1))
    return differs_by_state(model, example, lively, grad, recorded.drew, _most(real), True)


def _most(real: Observation) -> int:
    """How many ops a run on other numbers may take."""
    return _MOST_OPS + 20 * len(real.unpruned.nodes)


def _gives_now(
    model: nn.Module, example: Example, batch: int, grad: bool, real: Observation, asked: Callable[[], Any]
) -> tuple[Answer, Any]:
    """What a run of the model as it is now gives, and what is asked then; the model is put back after."""
    snapshot = Reach(model).snapshot(*tree.unflatten(example.leaves, example.spec))
    snapshot.save_buffers()
    try:  # a run that needs what was taken away gives what it raises
        return gives(model, example, batch, grad, (), snapshot), asked()
    finally:
        snapshot.restore(real.recorded.drew)


def _captured(
    model: nn.Module, example: Example, real: Observation, batch_symbol: str, batches: range, grad: bool, needed: bool,
    like: TracePlan | None,
) -> Captured:  # fmt: skip
    size, effects = real.evidence.batch, real.effects
    reasons: list[tuple[str, str]] = []
    plan: TracePlan | None = None
    ranging: Ranging | None = None
    unseen = ""  # how forward was seen to learn of its batch what no question shows
    if real.recorded.compared:
        unseen = f"{real.recorded.compared} compares by `is` what may be a size"
    others: list[Recording] = []  # what the plan rests on besides the run at the example's batch
    if like is not None and size == example.batch and not disagreement(like, real.plan):
        plan, batches = at_batch(real.plan, size), range(size, size + 1)
        reasons = [*like.not_captured_by]
    elif unseen:
        reasons.append(("symbolic", f"{unseen}, which a symbol answers otherwise; compare numbers by =="))
    elif example.sizes and (example.batch or not example.batched):
        ranging = over_sizes(model, example, real, batch_symbol, batches, grad, effects, reasons)
    resizes = bool(example.batched and example.batch)
    if plan is None and ranging is None and not unseen and resizes:
        try:
            _refuse_asked_data(real.plan)
            plan = symbolic(model, example, batch_symbol, batches, grad, effects, others)
        except UnsupportedError as error:
            unseen = "it makes a plain number of its batch" if isinstance(error, PlainNumberError) else ""
            reasons.append(("symbolic", str(error)))
        except Exception as error:  # whatever torch's fake tensors raise: the next way runs real ones
            reasons.append(("symbolic", first_line(error)))
    if plan is not None and plan.captured_by == "symbolic":
        plan, differs = held_against(plan, real)
        differs = differs if size in plan.batches else f"batch {size} is not covered"
        if differs:
            reasons.append(("symbolic", f"not what a real run does: {differs}"))
            plan, others = None, []
    shown = [real.evidence]
    if ranging is not None:
        plan, others, shown = ranging.plan, ranging.recordings, [*shown, *ranging.evidence]
    elif not resizes:
        plan = plan or replace(at_batch(real.plan, size), captured_by="observed")
    elif plan is None or above_1(batches) - plan.batches:
        ran: list[Recording] = []
        observed = _observed(model, example, batch_symbol, batches, grad, real, reasons, ran, unseen)
        if plan is None or len(observed.batches) > len(plan.batches):
            if plan is not None:
                reasons.insert(0, ("symbolic", "; ".join(plan.excluded)))
            plan, others = observed, ran
    inputs = [example] if ranging is None else [example, ranging.elsewhere]
    more: list[Evidence] = []
    for few in (0, 1):
        plan, ran_so = _at_few(model, inputs, plan, few, batches, grad, others, effects)
        more += ran_so
    here = sizes_in(example.sizes, example.leaves)
    unmet = plan.unmet({batch_symbol: example.batch, **here})
    reads = plan.captured_by == "observed" and size == example.batch and size in plan.batches and real.plan.questions
    strays = (
        differs_from(plan, real) if reads else None
    )  # runs at other batches agree, and draw or read what leads elsewhere
    if strays or (needed and (example.batch not in plan.batches or unmet)):
        reasons.append((plan.captured_by, strays or unmet or "; ".join(plan.excluded)))
        plan, more, others, shown = at_batch(real.plan, example.batch), [], [], [real.evidence]
    plan, recordings = replace(plan, not_captured_by=tuple(reasons)), [real.recorded, *others]
    asks_grad = grad and plan.assumption.grad is None
    # Fake tensors have no data to take: a symbolic plan has them, if at all, in a tensor that no op made.
    leaks = plan.captured_by != "symbolic" or bool(plan.constants)
    if leaks:
        other = _perturbed(model, example, size, batch_symbol, grad and not asks_grad, effects)
        if other is not None and size in plan.batches and not differs_from(plan, other):
            asks_grad = leaks = False  # neither other numbers nor gradients change what forward does
            recordings.append(other.recorded)
    if asks_grad:
        try:
            other = observe(model, example, size, batch_symbol, False, effects=effects)
        except AriadneError:
            raise
        except Exception:  # such as a forward that takes a gradient itself: it runs with gradients alone
            plan = replace(plan, assumption=replace(plan.assumption, grad=True))
        else:
            recordings.append(other.recorded)
            if size in plan.batches and differs_from(plan, other):
                plan = replace(plan, assumption=replace(plan.assumption, grad=True))
    asked = set[str]().union(*(recorded.switches for recorded in recordings))
    order = in_order(model, example.spec)
    plan = replace(plan, assumption=replace(plan.assumption, switches=switches.state_of(asked), order=order))
    if any(
        recorded.names & TYPED_CLASSES for recorded in recordings
    ):  # `isinstance` asks them, and nothing hears of it
        plan = replace(plan, assumption=replace(plan.assumption, dtypes=True))
    classes = tuple(tree.subclass_of(example.leaves[i]) for i, name in plan.inputs if plan.values[name].kind == "input")
    if any(classes):
        plan = replace(plan, assumption=replace(plan.assumption, classes=classes))
    if leaks:
        other = _perturbed(model, example, size, batch_symbol, grad, effects)
        if other is not None and _unexplained(real, other):
            again = observe(model, example, size, batch_symbol, grad, effects=effects)  # with caches filled, as there
            if not _unexplained(real, again):
                refuse_leaks(real.plan, other.plan)
            else:  # objects are made anew, or a cache is filled: what is no data's doing is alike in the two later runs
                refuse_unlike_constants(again.plan, other.plan)
                refuse_kept_data(real.plan, again.plan)
    plan = replace(plan, given=_given(plan, example), sizes=example.sizes, traced_sizes=tuple(here.items()))
    drew = frozenset[str]().union(*(recorded.drew for recorded in recordings))
    return Captured(check(plan), (*shown, *more), Baseline(model, recordings, example.leaves), drew)


def _refuse_asked_data(plan: TracePlan) -> None:
    """Raise `UnsupportedError` where forward asks whether its inputs' data, or the model's, are true: no symbolic run does so.

    On tensors without data that raises, or forward takes another way for it, as transformers' masks do. What is made of constants
    alone has data there, too.
    """
    of_data = {name for name, value in plan.values.items() if value.is_state or value.kind == "input"}
    for node in plan.nodes:
        if of_data.isdisjoint(node.reads):
            continue
        if node.target == "aten.is_nonzero.default" and node.is_witness:
            raise UnsupportedError(
                f"forward asks in {named(node.module)} whether data are true, and fake tensors have none"
            )
        of_data.update(node.outputs)


def _unexplained(real: Observation, other: Observation) -> bool:
    """Whether two real runs differ before a number that Python read differs.

    What comes after that number may use what came before it in one of them alone: then the plans differ in what was pruned.
    """
    return all(map(unexplained, (real.plan, real.unpruned), (other.plan, other.unpruned)))


def _perturbed(
    model: nn.Module, example: Example, batch: int, batch_symbol: str, grad: bool, effects: Effects
) -> Observation | None:
    """A real run on inputs with other numbers; None where the model can't be recorded on them."""
    try:
        return observe(model, example, batch, batch_symbol, grad, effects=effects, perturbed=True)
    except Exception:  # the model may refuse numbers that nobody asked it to run on
        return None


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
        changed = [f"{name!r} of {named(path)}" for path, name, _, _ in real.recorded.changed]
        set_up = [*real.carried] or changed or ["a container or an object"]
        raise UnsupportedError(
            f"forward sets up {', '.join(set_up[:3])} when it first runs, from that call's inputs or random numbers; later calls "
            f"use what it then was ({differs}), and a plan would set it up anew. Run the model once, model(*example_inputs), and "
            "prepare then; or keep such state in a buffer"
        )


def _at_few(
    model: nn.Module,
    inputs: Sequence[Example],
    plan: TracePlan,
    few: int,
    batches: range,
    grad: bool,
    recordings: list[Recording],
    effects: Effects,
) -> tuple[TracePlan, list[Evidence]]:
    """Batches 0 and 1 take paths of their own (sizes of 1 broadcast): each is covered if a real run does what the plan says."""
    if few not in batches or plan.traced_batch == few or plan.captured_by == "observed-per-batch":
        return plan, []
    one, runs = Batches.of([few]), list[Observation]()
    try:
        runs += [observe(model, example, few, plan.batch_symbol, grad, effects=effects) for example in inputs]
        differs = next(filter(None, (differs_from(plan, seen) for seen in runs)), None) or _lies_elsewhere(
            inputs, plan, few, [seen.plan.assumption for seen in runs]
        )
        unmet = (plan.unmet({plan.batch_symbol: few, **sizes_in(e.sizes, e.leaves)}) for e in inputs)
        differs = differs or next((f"it holds where {words}" for words in unmet if words), None)
    except Exception as error:  # the model itself may refuse one sample; it will say so again when it is asked to
        differs = first_line(error)
    if differs:
        return replace(plan, batches=plan.batches - one, excluded=(*plan.excluded, f"batch {few}: {differs}")), []
    recordings += [seen.recorded for seen in runs]
    plan = _assuming(plan, *(seen.plan.assumption for seen in runs))
    shown = [replace(seen.evidence, example=example) for seen, example in zip(runs, inputs, strict=True)]
    return replace(plan, batches=plan.batches | one), shown


def _lies_elsewhere(inputs: Sequence[Example], plan: TracePlan, few: int, seen: Sequence[Assumption]) -> str | None:
    """How a plan whose forward asks how tensors lie in memory can't serve `few`: there every tensor may be contiguous."""
    asked = [found for found in (plan.assumption, *seen) if found.layouts is not None]
    strides = any(found.strides for found in asked)
    for example in inputs if asked else ():
        here, there = (
            [layout(t, strides) for t in example.resized(batch) if isinstance(t, torch.Tensor)]
            for batch in (plan.traced_batch, few)
        )
        if here != there:
            return "forward asks how tensors lie in memory, and inputs cut from larger ones or transposed lie otherwise there"
    return None


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
    unseen: str,
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
            plan = check(prune(_as_far_as_shown(model, example, runs, batches, unseen)))
            plan = _assuming(plan, *(r.plan.assumption for r in runs))
            if here in plan.batches or here == 1:
                recordings += [r.recorded for r in runs if r is not real]
                return plan
        except CaptureError as error:
            reasons.append(("observed", str(error)))
        except Exception as error:  # the model may refuse a size that nobody asked it to run
            reasons.append(("observed", first_line(error)))
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
    model: nn.Module, example: Example, runs: Sequence[Observation], batches: range, unseen: str
) -> TracePlan:
    """The observed plan for all batches at which forward would have branched as it did, read from what it asks of sizes.

    Where that can't be followed, only for the batches that were run. `unseen`: how it was seen to learn of them unasked.
    """
    plan, why = _of_runs(runs)
    why = why or unseen
    wanted, shown = above_1(batches), Batches.of(r.plan.traced_batch for r in runs)
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
        differs = first_line(error)
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
