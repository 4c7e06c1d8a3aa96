"""`ariadne plan`: the plan of a model, how it was captured, what it relies on, what it does not cover."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

from ariadne.cli.output import Answer
from ariadne.cli.subject import load
from ariadne.guards import Baseline, shown
from ariadne.plan import Expr, TracePlan

MOST = 8  # names in a line


def run(options: Namespace) -> Answer:
    """Capture, and describe."""
    subject = load(options)
    captured = subject.captured()
    plan = captured.plan
    low, high = subject.spec("auto").batch_range
    fixed, missing = list(_fixed(plan)), [b for b in range(low, high + 1) if plan.batched and b not in plan.batches]
    guards = list(_guards(plan, captured.baseline))
    used = Counter(node.target for node in plan.nodes)
    asked = f", of the {low} to {high} that were asked for" if plan.batched else ""
    parts = [] if options.brief else [str(plan), ""]
    parts += [
        f"{subject.name}: {len(plan.nodes)} ops, {sum(v.kind == 'parameter' for v in plan.values.values())} parameters read",
        f"captured  {plan.captured_by}, in {'training' if plan.training else 'eval'} mode, at batch {plan.traced_batch}",
        *(f"  not {way}: {why}" for way, why in plan.not_captured_by),
        f"batches   {plan.for_batches.removeprefix('batch ')}{asked}",
        *(f"  not {reason}" for reason in plan.excluded),
    ]
    if plan.sizes:
        parts += ["sizes     beside the batch that may change:", *(f"  {line}" for line in plan.served)]
    if missing and plan.captured_by != "observed-per-batch":
        parts.append("  a batch that is not covered is captured when it first comes, as a plan of its own")
    elif missing:
        parts.append("  every batch is captured when it first comes, as a plan of its own")
    parts += ["fixed     sizes of inputs that are not the batch, and so must repeat:" if fixed else "fixed     nothing"]
    parts += [f"  {line}" for line in fixed]
    parts += ["guards    checked at every call; where one does not hold, the call is captured anew or refused:"]
    parts += [f"  {line}" for line in guards]
    data = {
        "model": subject.name,
        "captured_by": plan.captured_by,
        "not_captured_by": dict(plan.not_captured_by),
        "training": plan.training,
        "traced_batch": plan.traced_batch,
        "batches": [list(r) for r in plan.batches.ranges],
        "not_batches": list(plan.excluded),
        "sizes": list(plan.served),
        "fixed": fixed,
        "guards": guards,
        "attributes_read": _attributes(captured.baseline),
        "globals_read": _globals(captured.baseline),
        "ops": dict(used.most_common()),
        "signature": plan.signature,
        "plan": plan.to_json(),
    }
    return Answer("\n".join(parts), data)


def _attributes(baseline: Baseline) -> list[str]:
    """The attributes that forward reads, and what they hold, each once: `block.config.scales[0]`."""
    return list(dict.fromkeys(f"{path}.{shown(keys)}".removeprefix(".") for path, keys, _ in baseline.attributes))


def _globals(baseline: Baseline) -> list[str]:
    """What forward's functions read elsewhere: globals, and what objects of the model have from their classes."""
    return list(dict.fromkeys(outside.name.removeprefix("the global ") for outside in baseline.outside))


def _few(names: list[str]) -> str:
    more = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {more} more, which --json has" if more > 0 else "")


def _fixed(plan: TracePlan) -> Iterator[str]:
    """The inputs' dims that the plan holds as numbers."""
    for _, name in plan.inputs:
        value = plan.values[name]
        dims = [str(d) for d in value.shape if not isinstance(d, Expr)]
        if value.shape and not any(isinstance(d, Expr) for d in value.shape):
            yield f"{name}: {value.describe()}, the batch included: its dim 0 is not as large as the batch"
        elif dims:
            yield f"{name}: {value.describe()}"


def _guards(plan: TracePlan, baseline: Baseline) -> Iterator[str]:
    """What the plan relies on, in words."""
    inputs = [f"{name}: {plan.values[name].describe()} on {plan.values[name].device}" for _, name in plan.inputs]
    yield f"inputs have this structure, rank, dtype and device: {', '.join(inputs)}"
    yield plan.for_batches
    for position, value in plan.literals:
        yield f"input leaf {position} is {value!r}: no tensor, and so part of the plan"
    for name in plan.given:
        yield f"input {name!r} is the same object"
    for i, j in plan.tied_inputs:
        yield f"input leaves {i} and {j} are one tensor"
    yield (
        f"{len(baseline.modules)} modules have the classes and hooks that they had, {len(baseline.training)} of them the training "
        "flags, which forward may look at"
        + (
            f", and what forward reads as attributes is as it was: {_few(_attributes(baseline))}"
            if baseline.attributes
            else ""
        )
    )
    if baseline.outside:
        yield f"globals and attributes of classes that forward's functions read are as they were: {_few(_globals(baseline))}"
    if baseline.ties:
        yield f"{len(baseline.ties)} parameters or buffers that stand in several places are still one tensor in all of them"
    assumed = plan.assumption
    if assumed.grad is not None:
        yield f"gradients are {'on' if assumed.grad else 'off'}: forward, or an op, asks; the other mode has a plan of its own"
    if assumed.requires_grad is not None:
        yield f"requires_grad of {len(assumed.requires_grad)} parameters is as it was: forward asks"
    if assumed.autocast is not None:
        yield "autocast is as it was: forward asks"
    if assumed.layouts is not None:
        yield "memory formats of the inputs are as they were: forward asks"
    if assumed.dtypes:
        yield "dtypes and devices of parameters and buffers are as they were: forward, or an op, names them"
    if assumed.shapes:
        yield "shapes of parameters and buffers are as they were: forward asks"
    for node in plan.nodes:
        if node.is_witness:
            where = node.module or "the model itself"
            known = f"{node.target} in {where} gives {node.witness}"
            yield f"{known}: Python reads it out of a tensor; another answer has a plan of its own"
