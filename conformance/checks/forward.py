"""Forward: the split under no_grad against the whole, both from one state and one seed."""

from __future__ import annotations

from torch import nn

from conformance.bench import Bench, Split
from conformance.cases import Case
from conformance.checks.base import (
    PASSED,
    Check,
    Outcome,
    at,
    hold,
    hold_outcomes,
    hold_rng,
    hold_state,
    no_grad,
    outcome,
)
from conformance.checks.tolerance import hold_near
from conformance.statuses import Finding

BITWISE = ("generated", "debug")


def run(bench: Bench, case: Case) -> Finding:
    """Outputs with their structure and strides, all that the model holds, and the generators."""
    bench.judge(case.training)
    twin = bench.whole(case.training)
    whole = outcome(lambda: no_grad(twin, bench.inputs(case.bs)), case.bs)
    for split in bench.splits(case):
        _hold(bench, case, split, twin, whole)
    return PASSED


def _hold(bench: Bench, case: Case, split: Split, twin: nn.Module, whole: Outcome) -> None:
    args, kwargs = bench.inputs(case.bs)
    found = outcome(lambda: split.forward(*args, **kwargs), case.bs)
    hold_outcomes(whole, found)
    if case["backend"] in BITWISE:
        hold("output", whole.value, found.value, at(split))
        hold_state(twin, split, bench, at(split))
    else:
        reference = bench.whole(case.training), no_grad, bench.inputs(case.bs), case.bs
        hold_near(bench, reference, whole.value, found.value, f"output, {at(split)}")
    hold_rng(whole, found, at(split))


CHECK = Check("forward", ("cut", "bs", "mode", "backend"), "prefix and suffix give what the model gives", run)
