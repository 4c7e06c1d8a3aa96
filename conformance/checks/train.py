"""Training: steps of SGD with momentum, in lockstep with a twin; after each, all that a step may move is compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.bench import Bench, Split
from conformance.cases import Case
from conformance.checks.base import (
    PASSED,
    Check,
    Outcome,
    at,
    hold,
    hold_moved,
    hold_outcomes,
    hold_rng,
    hold_state,
    outcome,
)
from conformance.compare import frozen, mapped, tensors
from conformance.statuses import Finding, Status, Stop

RATE, MOMENTUM = 1e-5, 0.9


def run(bench: Bench, case: Case) -> Finding:
    """Outputs and loss, every gradient (None told from zero), parameters, buffers, optimizer state, generators."""
    bench.judge(case.training, gradients=True)
    for split in bench.splits(case):
        _hold(bench, case, split)
    return PASSED


class Trained:
    """One of the twins, with its optimizer; `step` trains it once, whole or split, and keeps what came of it."""

    def __init__(self, bench: Bench, model: nn.Module, runtime: Any = None) -> None:
        self.bench, self.model, self.runtime = bench, model, runtime
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.output: Any = None
        self.inputs: Any = None

    def step(self, batch: int, step: int) -> Outcome:
        """One step on the inputs of that number; every other step asks for the gradients of the inputs too."""
        self.inputs = self.bench.inputs(batch, 10 + step)
        if step % 2:
            self.inputs = mapped(_wanting, self.inputs)
        return outcome(self._step, step)

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        args, kwargs = self.inputs
        targets = object()

        def loss_of(output: Any, given: Any) -> torch.Tensor:
            if given is not targets:
                raise Stop(Status.FAIL_STRUCTURE, "loss_fn was not given the targets")
            self.output = frozen(output)
            return self.bench.entry.loss(output)

        if self.runtime is None:
            loss = loss_of(self.model(*args, **kwargs), targets)
            loss.backward()
        else:
            boundary = self.runtime.run_training_prefix(*args, **kwargs)
            loss, gradients = self.runtime.train_suffix(boundary, targets, loss_fn=loss_of)
            self.runtime.backward_prefix(boundary, gradients)
        self.optimizer.step()
        return loss.detach()

    def moved(self) -> dict[str, Any]:
        """What a step moved outside of the model; gradients count with the tensors that hold them."""
        return {"inputs": self.inputs, "optimizer": self.optimizer.state_dict()["state"]}


def _wanting(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.is_floating_point())


def _hold(bench: Bench, case: Case, split: Split) -> None:
    whole, mine = Trained(bench, bench.whole(case.training)), Trained(bench, split.model, split.runtime)
    losses = []
    for step in range(int(case["steps"])):
        where = f"step {step}, {at(split)}"
        expected, found = whole.step(case.bs, step), mine.step(case.bs, step)
        if hold_outcomes(expected, found):
            bench.facts["both_raise"] = type(expected.error).__name__
            return
        if not bool(torch.isfinite(expected.value)):
            raise Stop(Status.DEGENERATE, f"the whole model's loss is {expected.value.item()} at step {step}")
        hold("output", whole.output, mine.output, where)
        hold("loss", expected.value, found.value, where)
        hold_state(whole.model, split, bench, where)
        hold_moved(whole.moved(), mine.moved(), where)
        hold_rng(expected, found, where)
        losses.append(expected.value.item())
    bench.facts["losses"] = losses
    bench.facts["input_gradients"] = any(t.grad is not None for _, t in tensors(whole.inputs))


CHECK = Check(
    "train", ("cut", "bs", "mode", "backend", "steps"), "split training moves all that whole training moves", run
)
