"""Compiled segments: their kernels differ from eager's, so both are held against a run in float64."""

from __future__ import annotations

from typing import Any

from conformance.bench import Bench
from conformance.compare import difference
from conformance.oracle import beyond, in_double
from conformance.statuses import Status, Stop


def hold_near(bench: Bench, reference: tuple[Any, ...], whole: Any, found: Any, where: str) -> None:
    """Stop where a result is farther from float64 than eager's own error allows; equal bits need no reference.

    `reference` are the arguments of `oracle.in_double`. Strides may differ: a compiler chooses its own.
    """
    differs = difference(whole, found)
    if differs is None:
        bench.facts["bitwise"] = True
        return
    if differs.status is Status.FAIL_STRUCTURE and not differs.what.startswith("stride"):
        raise Stop(differs.status, f"{differs}; {where}")
    wrong, worst = beyond(in_double(*reference), whole, found)
    bench.facts.update({f"worst_{name}": round(ratio, 3) for name, ratio in worst.items()})
    if wrong:
        raise Stop(wrong.status, f"{wrong}; {where}")
