"""Inputs and memory: what a call writes into, what shares memory with what, and gradients that were there before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.checks.base import (
    PASSED,
    Check,
    at,
    hold,
    hold_moved,
    hold_outcomes,
    hold_rng,
    hold_state,
    no_grad,
    outcome,
)
from conformance.suite.bench import REFERENCE, Bench
from conformance.suite.cases import Case
from conformance.suite.compare import sharing, tensors
from conformance.suite.statuses import Finding, Status, Stop


def run(bench: Bench, case: Case) -> Finding:
    """First without gradients: inputs afterwards, aliasing, tied weights; then a step onto gradients that are there."""
    bench.judge(case.training)
    split = bench.split(case["cut"], case.training)
    where, batch = at(split), REFERENCE
    twin = bench.whole(case.training)
    ours, theirs = bench.inputs(batch), bench.inputs(batch)
    for model in (twin, split.model):
        _give_gradients(model)
    whole = outcome(lambda: no_grad(twin, ours), batch)
    found = outcome(lambda: split.forward(*theirs[0], **theirs[1]), batch)
    hold_outcomes(whole, found)
    hold("output", whole.value, found.value, where)
    hold_moved(ours, theirs, f"inputs after a forward, {where}")
    _hold_sharing(twin, ours, whole.value, split.model, theirs, found.value, where)
    hold_state(twin, split, bench, where)
    hold_rng(whole, found, where)
    if bench.trainable(case.training):
        _hold_accumulation(bench, case, batch)
    return PASSED


def _give_gradients(model: nn.Module) -> None:
    """Every other parameter has a gradient already."""
    for p in list(model.parameters())[::2]:
        if p.requires_grad:
            p.grad = torch.linspace(-1, 1, p.numel(), dtype=p.dtype, device=p.device).reshape(p.shape)


def _named(model: nn.Module, inputs: Any, output: Any) -> list[tuple[str, torch.Tensor]]:
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [
        *((f"input{where}", t) for where, t in tensors(inputs, every_path=True)),
        *((f"model.{name}", t) for name, t in state),
        *((f"output{where}", t) for where, t in tensors(output, every_path=True)),
    ]


def _hold_sharing(
    twin: nn.Module, ours: Any, output: Any, model: nn.Module, theirs: Any, found: Any, where: str
) -> None:
    """Outputs share memory with inputs, with what the model holds and with each other as the whole's do; so do weights."""
    expected, given = sharing(_named(twin, ours, output)), sharing(_named(model, theirs, found))
    if expected != given:
        lost, new = [g for g in expected if g not in given], [g for g in given if g not in expected]
        raise Stop(Status.FAIL_STATE, f"memory is shared otherwise, {where}: whole {lost}, split {new}")


def _hold_accumulation(bench: Bench, case: Case, batch: int) -> None:
    """Gradients on parameters and inputs are added to."""
    split = bench.split(case["cut"], case.training, trained=True)
    twin = bench.whole(case.training)
    given = []
    for model in (twin, split.model):
        _give_gradients(model)
        given.append(bench.given(batch, batch, case.training, held=0.5))

    def whole() -> torch.Tensor:
        loss = bench.entry.loss(twin(*given[0][0], **given[0][1]))
        loss.backward()
        return loss.detach()

    def halves() -> torch.Tensor:
        boundary = split.runtime.run_training_prefix(*given[1][0], **given[1][1])
        loss, gradients = split.runtime.train_suffix(boundary, loss_fn=lambda output, _: bench.entry.loss(output))
        split.runtime.backward_prefix(boundary, gradients)
        return loss

    expected, found = outcome(whole, batch), outcome(halves, batch)
    hold_outcomes(expected, found)
    where = f"gradients added up, {at(split)}"
    hold("loss", expected.value, found.value, where)
    hold_state(twin, split, bench, where)
    hold_moved(given[0], given[1], f"inputs, {where}")


CHECK = Check(
    "inputs", ("cut", "mode"), "inputs, aliasing, tied weights and gradients that are there are respected", run
)
