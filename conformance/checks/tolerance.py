"""Compiled segments: their kernels differ from eager's, so both are held against a run in float64."""

from __future__ import annotations

from typing import Any

from conformance.bench import Bench, Split
from conformance.cases import Case
from conformance.checks.base import at, no_grad
from conformance.compare import difference
from conformance.oracle import beyond, in_double
from conformance.statuses import Status, Stop


def hold_near(bench: Bench, case: Case, split: Split, whole: Any, found: Any) -> None:
    """Stop where a compiled forward is farther from float64 than eager's own error allows; equal bits need no reference."""
    differs = difference(whole, found)
    if differs is None:
        bench.facts["bitwise"] = True
        return
    if differs.status is Status.FAIL_STRUCTURE and not differs.what.startswith("stride"):
        raise Stop(differs.status, f"output, {at(split)}: {differs}")

    reference = in_double(bench.whole(case.training), no_grad, bench.inputs(case.bs), case.bs)
    wrong, worst = beyond(reference, whole, found)
    bench.facts.update({f"worst_{name}": round(ratio, 3) for name, ratio in worst.items()})
    if wrong:
        raise Stop(wrong.status, f"output, {at(split)}: {wrong}")
