"""Transforms of torch.func after the cut: what crosses may stand inside of them, and is refused where they take it apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import TrainingError

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A forward that has `body` between two layers, and an ensemble."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.middle, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.several = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.body(self, self.enter(x)))
        return found


def _ensemble(m: Any, h: Tensor) -> Tensor:
    parameters, buffers = torch.func.stack_module_state(m.several)

    def one(p: Any, b: Any, x: Tensor) -> Any:
        return torch.func.functional_call(m.several[0], (p, b), (x,))

    found: Tensor = torch.func.vmap(one, (0, 0, None))(parameters, buffers, h).mean(0)
    return found


def _enclosed(m: Any, h: Tensor) -> Tensor:
    rows = torch.func.vmap(lambda w: torch.tanh(h @ w) * h)(torch.stack([part[0].weight for part in m.several]))
    return rows.mean(0) + torch.func.grad(lambda b: (h * b).tanh().sum())(m.middle.bias)


def _samples(m: Any, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: m.middle(row).tanh() * row.norm())(h)


def _samples_of_its_own(m: Any, h: Tensor) -> Tensor:
    return _samples(m, h.view_as(h))


def split(model: Net) -> Any:
    return prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("after:enter", trainable=True), fallback="python")


@pytest.mark.parametrize("body", [_ensemble, _enclosed, _samples_of_its_own])
def test_what_crosses_trains_inside_of_a_transform(body: Body) -> None:
    model = Net(body)
    whole, x = copy.deepcopy(model), torch.randn(3, 4)
    runtime = split(model)
    expected = whole(x).square().sum()
    expected.backward()
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().sum())
    runtime.backward_prefix(boundary, gradients)
    assert torch.equal(loss, expected)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def test_what_crosses_is_refused_where_a_transform_takes_it_apart() -> None:
    with pytest.raises(TrainingError, match=r"a transform such as vmap takes it.*view_as"):
        split(Net(_samples))
