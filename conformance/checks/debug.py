"""The debug interpreter against generated code: two readings of one plan, which share nothing but the plan."""

from __future__ import annotations

from conformance.checks.base import (
    PASSED,
    Check,
    Outcome,
    at,
    hold,
    hold_moved,
    hold_outcomes,
    hold_rng,
    outcome,
)
from conformance.checks.train import Trained
from conformance.suite.bench import Bench
from conformance.suite.cases import Case
from conformance.suite.compare import frozen, tensors
from conformance.suite.statuses import Finding, Status, Stop

BOTH = ("generated code", "the debug interpreter")


def run(bench: Bench, case: Case) -> Finding:
    """Outputs, what crosses the cut, and one training step with all its gradients, by both."""
    bench.judge(case.training)
    generated = bench.split(case["cut"], case.training)
    where = at(generated)
    trains = bench.trainable(case.training)
    forward, crossing, trained, ops = _observed(bench, case, "generated", trains)
    found, crossed, stepped, others = _observed(bench, case, "debug", trains)
    if ops != others:
        raise Stop(Status.FAIL_STRUCTURE, f"{case['cut']} is op {ops} in generated mode and {others} in debug mode")
    _hold_both(forward, found)
    hold("boundary", crossing, crossed, where)
    hold("output", forward.value, found.value, where)
    hold_rng(forward, found, where)
    if trained is None or stepped is None:
        return PASSED
    _hold_both(trained[0], stepped[0])
    hold("loss", trained[0].value, stepped[0].value, where)
    hold_moved(trained[1], stepped[1], f"after a training step, {where}")
    hold_rng(trained[0], stepped[0], where)
    return PASSED


def _hold_both(generated: Outcome, interpreted: Outcome) -> None:
    """Raise what both raise, for the whole model was seen to run on this batch; Stop where one of them does."""
    if generated.error is not None and interpreted.error is not None:
        raise generated.error
    hold_outcomes(generated, interpreted, BOTH)


def _form(raw: object) -> list[tuple[object, ...]]:
    """What crosses, without its numbers: memory that nothing was written to yet may cross, too."""
    return [(where, t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for where, t in tensors(raw)]


def _observed(
    bench: Bench, case: Case, backend: str, trains: bool
) -> tuple[Outcome, object, tuple[Outcome, object] | None, list[object]]:
    """A forward, the values that crossed, if it `trains` a training step with copies of what it moved, and the ops cut at."""
    split = bench.split(case["cut"], case.training, backend)
    args, kwargs = bench.inputs(case.bs)
    crossing: list[object] = []
    ops = [split.facts["op"]]

    def forward() -> object:
        boundary = split.runtime.run_prefix(*args, **kwargs)
        crossing.extend(_form(boundary.raw))
        return split.runtime.run_suffix(boundary)

    ran = outcome(forward, case.bs)
    buffers = frozen(dict(split.model.named_buffers()))
    if not trains:
        return ran, crossing, None, ops
    split = bench.split(case["cut"], case.training, backend, trained=True)
    ops.append(split.facts["op"])
    step = Trained(bench, split.model, split.runtime)
    done = step.step(case.bs, 1)
    moved = {
        "buffers_after_forward": buffers,
        "parameters": frozen(dict(split.model.named_parameters())),
        "gradients": {name: p.grad for name, p in split.model.named_parameters()},
        "buffers": frozen(dict(split.model.named_buffers())),
        **step.moved(),
    }
    return ran, crossing, (done, moved), ops


CHECK = Check(
    "debug", ("cut", "bs", "mode"), "the debug interpreter and generated code do the same", run, of_plans=True
)
