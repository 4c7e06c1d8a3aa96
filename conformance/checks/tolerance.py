"""Compiled segments: their kernels differ from eager's, so both are held against a run in float64."""

from __future__ import annotations

from typing import Any

from conformance.suite.bench import Bench
from conformance.suite.compare import difference, form_difference
from conformance.suite.oracle import beyond, in_double
from conformance.suite.statuses import Stop


def hold_near(bench: Bench, reference: tuple[Any, ...], whole: Any, found: Any, where: str) -> None:
    """Stop where a result is farther from float64 than eager's own error allows; equal bits need no reference.

    `reference` are the arguments of `oracle.in_double`. Strides may differ: a compiler chooses its own.
    """
    other = form_difference(whole, found)
    if other:
        raise Stop(other.status, f"{other}; {where}")
    if difference(whole, found) is None:
        bench.facts["bitwise"] = True
        return
    wrong, worst = beyond(in_double(*reference), whole, found)
    bench.facts.update({f"worst_{name}": round(ratio, 3) for name, ratio in worst.items()})
    if wrong:
        raise Stop(wrong.status, f"{wrong}; {where}")
