"""Rows: a batch through the split against its rows one by one through the whole model, by the float64 rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import model_zoo
from conformance.checks.base import PASSED, Check, at, no_grad
from conformance.suite.bench import Bench
from conformance.suite.cases import Case
from conformance.suite.compare import mapped, tensors
from conformance.suite.oracle import beyond, in_double
from conformance.suite.state import seed_all
from conformance.suite.statuses import Finding, Status, Stop

ROUNDING = 1e-9  # relative to the largest output: what float64 kernels may differ by from batch to batch


def run(bench: Bench, case: Case) -> Finding:
    """In eval mode; a model whose float64 rows depend on each other has no reference here."""
    bench.judge(False)
    batch = case.bs
    split = bench.split("q50", False)
    args, kwargs = bench.inputs(batch)
    seed_all(batch)
    found = _leaves(split.forward(*args, **kwargs))

    def together(model: nn.Module, inputs: Any) -> Any:
        return _leaves(no_grad(model, inputs))

    def one_by_one(model: nn.Module, inputs: Any) -> Any:
        return _joined([_leaves(no_grad(model, _row(inputs, i, batch))) for i in range(batch)])

    twin = bench.whole(False)
    names = _leaves(no_grad(bench.whole(False), bench.inputs(batch))).keys()
    if found.keys() != names:
        raise Stop(Status.FAIL_STRUCTURE, f"the split gives {list(found)}, the whole model {list(names)}; {at(split)}")
    wide, single = (in_double(twin, call, bench.inputs(batch), batch) for call in (together, one_by_one))
    rows = [where for where in single if where in found and where in wide and wide[where].shape[:1] == (batch,)]
    if not rows:
        raise Stop(Status.NO_REFERENCE, "no output has a row for each sample")
    for where in rows:
        _hold_independent(where, wide[where], single[where])
    eager = one_by_one(bench.whole(False), bench.inputs(batch))
    wrong, worst = beyond(*({where: given[where] for where in rows} for given in (single, eager, found)))
    bench.facts.update({f"worst_{name}": round(ratio, 3) for name, ratio in worst.items()}, outputs=len(rows))
    if wrong:
        raise Stop(wrong.status, f"rows of a batch of {batch}{wrong.where}: {wrong.what}; {at(split)}")
    return PASSED


def _leaves(output: Any) -> dict[str, torch.Tensor]:
    # By every path: the whole may return one list in two places, where the split returns two of the same tensors.
    return dict(tensors(output, every_path=True))


def _row(inputs: Any, i: int, batch: int) -> Any:
    """One row of every tensor that has the batch as dim 0."""
    return mapped(lambda t: t[i : i + 1] if t.dim() and t.shape[0] == batch else t, inputs)


def _joined(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The outputs of single rows as one batch, where each gives one row."""
    names = [where for where, t in rows[0].items() if all(where in r and r[where].shape[:1] == (1,) for r in rows)]
    return {where: torch.cat([r[where] for r in rows]) for where in names}


def _hold_independent(where: str, wide: torch.Tensor, single: torch.Tensor) -> None:
    if wide.shape != single.shape:
        raise Stop(Status.NO_REFERENCE, f"{where}: a batch gives {list(wide.shape)}, its rows {list(single.shape)}")
    if not wide.is_floating_point():
        apart = not torch.equal(wide, single)
    else:
        scale = single[torch.isfinite(single)].abs().max().item() if single.numel() else 0.0
        apart = not torch.allclose(wide, single, rtol=ROUNDING, atol=ROUNDING * scale, equal_nan=True)
    if apart:
        reason = f"output{where}: the whole model's rows depend on each other, in float64 too"
        raise Stop(Status.NO_REFERENCE, reason)


def applies(entry: model_zoo.Entry) -> bool:
    """Whether each row has an answer of its own that a float64 run can give."""
    return not entry.tags & {"rows-mixed", "no-double", "draws-in-eval", "own-generator", "varying-output"}


CHECK = Check(
    "rows", ("bs",), "rows of a batch come out as they do alone, where the model keeps them apart", run, applies
)
