"""Forward: the split under no_grad against the whole, both from one state and one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from conformance.checks.base import (
    PASSED,
    Check,
    Outcome,
    at,
    hold,
    hold_counts,
    hold_outcomes,
    hold_rng,
    hold_state,
    left,
    no_grad,
    outcome,
)
from conformance.checks.tolerance import hold_near
from conformance.suite.bench import Bench, Split
from conformance.suite.cases import Case
from conformance.suite.statuses import Finding

BITWISE = ("generated", "debug")


def run(bench: Bench, case: Case) -> Finding:
    """Outputs with their structure and strides, all that the model holds, and the generators; by each way to run the halves."""
    bench.judge(case.training)
    twin, inputs, whole = bench.once((case.training, case.bs), lambda: _whole(bench, case))
    for split in bench.splits(case):
        _hold(bench, case, split, twin, inputs, whole)
    return PASSED


def _whole(bench: Bench, case: Case) -> tuple[nn.Module, Any, Outcome]:
    """The whole model after a call, the inputs that it was given, and how the call ended: one for all cuts, since none is there."""
    twin, inputs = bench.whole(case.training), bench.inputs(case.bs)
    return twin, inputs, outcome(lambda: no_grad(twin, inputs), case.bs)


def _hold(bench: Bench, case: Case, split: Split, twin: nn.Module, inputs: Any, whole: Outcome) -> None:
    for way in split.ways:
        bench.side(case.training)
        _hold_way(bench, case, split, way, twin, inputs, whole)


def _hold_way(
    bench: Bench, case: Case, split: Split, way: Callable[..., Any], twin: nn.Module, inputs: Any, whole: Outcome
) -> None:
    args, kwargs = bench.inputs(case.bs)
    found = outcome(lambda: way(*args, **kwargs), case.bs)
    hold_outcomes(whole, found)
    if case["backend"] in BITWISE:
        hold("output", whole.value, found.value, at(split))
        hold_state(twin, split, bench, at(split))
    else:
        reference = bench.whole(case.training), _run, bench.inputs(case.bs), case.bs
        expected, given = left(twin, inputs, whole.value), left(split.model, (args, kwargs), found.value)
        hold_counts(expected, given, f"after a forward, {at(split)}")
        hold_near(bench, reference, expected, given, f"after a forward, {at(split)}")
    hold_rng(whole, found, at(split))


def _run(model: nn.Module, inputs: Any) -> Any:
    return left(model, inputs, no_grad(model, inputs))


CHECK = Check("forward", ("cut", "bs", "mode", "backend"), "prefix and suffix give what the model gives", run)
