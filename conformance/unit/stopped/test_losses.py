"""Losses of a Python split that take gradients, or run a backward pass, by themselves: as in a split with a graph, or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ariadne import SplitSpec, prepare_split
from ariadne.errors import TrainingError


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).relu()) * (1 + 0 * random.random())
        return self.c(self.a(h) if self.tied else h)  # type: ignore[no-any-return]


def stopped(tied: bool) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net(tied)
    split = SplitSpec("after:b", trainable=True)
    return model, prepare_split(model, (torch.randn(3, 4),), split=split, fallback="python")


def penalised(output: Tensor, parameter: Tensor, **options: Any) -> Tensor:
    loss = output.square().sum()
    (found,) = torch.autograd.grad(loss, parameter, create_graph=True, **options)
    return loss if found is None else loss + found.square().sum()


@pytest.mark.parametrize(("name", "tied"), [("a", True), ("a", False), ("b", False)])
@pytest.mark.parametrize("options", [{}, {"allow_unused": True}])
def test_the_gradient_of_a_parameter_from_before_the_cut_is_refused(name: str, tied: bool, options: Any) -> None:
    model, runtime = stopped(tied)
    parameter = getattr(model, name).weight
    with pytest.raises(TrainingError, match="for the gradient of a leaf from before the cut"):
        runtime.train_suffix(
            runtime.run_training_prefix(torch.randn(3, 4)), loss_fn=lambda o, _: penalised(o, parameter, **options)
        )


@pytest.mark.parametrize("fallback", ["python", "python-suffix"])
def test_so_it_is_where_the_boundary_came_as_bytes(fallback: str) -> None:
    torch.manual_seed(0)
    model, x = Net(False), torch.randn(3, 4)
    runtime: Any = prepare_split(model, (x,), split=SplitSpec("after:b", trainable=True), fallback=fallback)  # type: ignore[call-overload]
    boundary = runtime.run_training_prefix(x)
    carried = type(boundary).from_bytes(boundary.to_bytes())
    with pytest.raises(TrainingError, match="with respect to something that the graph of the loss does not hold"):
        runtime.train_suffix(carried, loss_fn=lambda o, _: penalised(o, model.a.weight, allow_unused=True))


def test_the_gradient_of_a_parameter_after_the_cut_is_that_of_the_model() -> None:
    model, runtime = stopped(False)
    x = torch.randn(3, 4)
    penalised(model(x), model.c.weight).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: penalised(o, model.c.weight))
    runtime.backward_prefix(boundary, gradients)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))


def test_a_gradient_that_does_not_come_from_the_boundary_is_given() -> None:
    model, runtime = stopped(False)

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        (found,) = torch.autograd.grad(model.a.weight.square().sum(), model.a.weight)
        assert torch.equal(found, 2 * model.a.weight)
        return output.sum()

    runtime.train_suffix(runtime.run_training_prefix(torch.randn(3, 4)), loss_fn=loss_fn)


def test_one_optimizer_for_both_calls_is_refused_where_it_would_step_too_early() -> None:
    model, runtime = stopped(False)
    boundary = runtime.run_training_prefix(torch.randn(3, 4))
    with pytest.raises(TrainingError, match=r"owns 4 parameter\(s\) that the prefix uses too"):
        runtime.train_suffix(boundary, loss_fn=lambda o, _: o.sum(), optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_a_reentrant_checkpoint_on_the_prefix_and_an_optimizer_that_would_clear_it() -> None:
    model, runtime = stopped(False)

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        ones = torch.ones(4, requires_grad=True)
        more: Tensor = checkpoint(lambda z: (z @ model.b.weight).sum(), ones, use_reentrant=True)
        return output.sum() + more

    boundary = runtime.run_training_prefix(torch.randn(3, 4))
    _, gradients = runtime.train_suffix(boundary, loss_fn=loss_fn)
    with pytest.raises(TrainingError, match="loss_fn ran a backward pass of its own, as a reentrant checkpoint does"):
        runtime.backward_prefix(boundary, gradients, optimizer=torch.optim.SGD(model.b.parameters(), 0.1))
