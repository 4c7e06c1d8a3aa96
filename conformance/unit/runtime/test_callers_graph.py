"""A graph of the caller's that made a weight: no proof of Ariadne's walks into it, frees it, or has its hooks run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitRuntime, SplitSpec, prepare_split


class Plain(nn.Module):
    """Reads the weight from an attribute. Its own parameters may make it, and one of them is read by itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(0.1)
        self.hyper = nn.Linear(3, 16)
        self.hold(torch.eye(4))

    def hold(self, weight: Tensor) -> None:
        self.weight = weight

    def held(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.read(self.first(x), self.held()))) + self.hyper.bias[:2]

    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class Listed(Plain):
    """Reads it from a list, twice, and once by broadcasting."""

    def hold(self, weight: Tensor) -> None:
        self.weights = [weight]

    def held(self) -> Tensor:
        return self.weights[0]

    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight + (x.unsqueeze(1) * weight).sum(1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale: float, x: Tensor, weight: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x, weight)
        return x @ weight * scale

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        return None, gradient @ weight.T * ctx.scale, x.T @ gradient * ctx.scale


class Fast(Plain):
    """Reads it from the parameter that it stands for, as fast weights of MAML, by a function of autograd."""

    def hold(self, weight: Tensor) -> None:
        self.last.weight.fast = weight

    def held(self) -> Tensor:
        return self.last.weight.fast

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(Doubled.apply(2.0, x, self.held())))) + self.hyper.bias[:2]


X, Y = torch.arange(12.0).view(3, 4).cos(), torch.arange(6.0).view(3, 2).sin()
KINDS = [Plain, Listed, Fast]


def step(model: nn.Module, runtime: SplitRuntime | None) -> None:
    torch.manual_seed(1)
    if runtime is None:
        F.mse_loss(model(X), Y).backward()
        return
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, Y, loss_fn=F.mse_loss)
    runtime.backward_prefix(boundary, gradients)


def by_own(model: Plain) -> Tensor:
    return model.hyper(torch.ones(3)).tanh().view(4, 4)


def by_another(model: Plain) -> Tensor:
    source = nn.Linear(3, 16)
    return source(torch.ones(3)).exp().view(4, 4)


def twice(
    kind: type[Plain], make: Callable[[Plain], Tensor], split: bool, prepared: bool, watched: bool
) -> list[object]:
    """What two steps of a model give, the second with another rate of dropout, for which a split captures a plan."""
    torch.manual_seed(0)
    model, seen = kind(), []

    def anew() -> Tensor:
        weight = make(model)
        if watched:
            weight.retain_grad()
            weight.register_hook(lambda g: seen.append(g.clone()))
        model.hold(weight)
        return weight

    weights = [anew()]
    runtime = prepare_split(model, (X,), split=SplitSpec("after:first", trainable=prepared)) if split else None
    step(model, runtime)
    weights.append(anew())
    model.drop.p = 0.3
    step(model, runtime)
    return [*(p.grad for p in model.parameters()), *seen, *(w.grad for w in weights if watched)]


def same(one: list[object], other: list[object]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_made_of_the_models_own_parameters_trains(kind: type[Plain], prepared: bool) -> None:
    whole = twice(kind, by_own, False, prepared, False)
    assert same(whole, twice(kind, by_own, False, prepared, False))
    assert same(whole, twice(kind, by_own, True, prepared, False))


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("make", [by_own, by_another])
@pytest.mark.parametrize("kind", KINDS)
def test_no_hook_of_a_weight_made_elsewhere_runs_for_a_proof(
    kind: type[Plain], make: Callable[[Plain], Tensor], prepared: bool
) -> None:
    assert same(twice(kind, make, False, prepared, True), twice(kind, make, True, prepared, True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_was_walked_back_before_is_no_hindrance(kind: type[Plain]) -> None:
    model = kind()
    weight = by_own(model)
    weight.sum().backward()  # which frees it
    model.hold(weight)
    runtime = prepare_split(model.eval(), (X,), split=SplitSpec("after:first", trainable=True))
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))
