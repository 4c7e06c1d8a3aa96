"""Casts that autocast keeps: those of one block around several calls, and none after a block that forward opens by itself."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ariadne import prepare_split
from conformance.unit.trap_kit import same

casting = partial(torch.autocast, "cpu", torch.bfloat16)


class Net(nn.Module):
    """Draws from numpy, for which no graph holds; may cast by itself."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.a, self.b, self.casts = nn.Linear(6, 6), nn.Linear(6, 2), casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with casting() if self.casts else nullcontext():
            return self.b(torch.tanh(self.a(x))) + float(numpy.random.rand()) * 0


def step(model: Any, runtime: Any, x: torch.Tensor) -> torch.Tensor:
    if runtime is None:
        loss = model(x).float().pow(2).mean()
        loss.backward()
        return loss.detach()
    boundary = runtime.run_training_prefix(x)
    found, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.float().pow(2).mean())
    runtime.backward_prefix(boundary, gradients)
    return found


@pytest.mark.parametrize("around", ["one block", "a block each", "forward's own"])
def test_a_block_around_several_steps_keeps_its_casts(around: str) -> None:
    torch.manual_seed(0)
    whole, x = Net(around == "forward's own"), torch.randn(4, 6)
    split = copy.deepcopy(whole)
    runtime: Any = prepare_split(split, (x,), split="after:a", fallback="python")

    def steps(model: Any, runtime: Any) -> Any:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        with casting() if around == "one block" else nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                with casting() if around != "forward's own" else nullcontext():
                    losses.append(step(model, runtime, x))
                optimizer.step()
        return losses, [p.detach() for p in model.parameters()]

    expected = steps(whole, None)
    same(expected, steps(split, runtime))
    moved = [not torch.equal(expected[0][0], loss) for loss in expected[0][1:]]
    assert moved == [around != "one block"] * 2  # casts of weights that have moved since
