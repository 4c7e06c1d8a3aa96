"""Weights that a graph of the caller's made, as a hypernetwork does: preparing leaves it whole, and a step goes through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.errors import TrainingError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(self.enter(x)).relu())


def made(sides: str) -> tuple[Net, list[Tensor]]:
    """A model with weights made of others, and all leaves."""
    torch.manual_seed(0)
    model, source, net = Net(), torch.randn(3, requires_grad=True), nn.Linear(3, 24 + 12)
    weights = net(source).tanh()
    for name, found in (("enter", weights[:24].view(6, 4)), ("leave", weights[24:].view(2, 6))):
        if name in sides:
            part = model.get_submodule(name)
            del part.weight
            part.weight = found
    return model, [source, *net.parameters(), *model.parameters()]


X = torch.arange(12.0).view(3, 4).cos()


def step(runtime: SplitRuntime) -> None:
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda y, _: y.square().sum())
    runtime.backward_prefix(boundary, gradients)


@pytest.mark.parametrize("sides", ["enter", "leave"])
def test_a_step_goes_on_through_what_made_a_weight(sides: str) -> None:
    model, whole = made(sides)
    model(X).square().sum().backward()
    model, leaves = made(sides)
    step(prepare_split(model, (X,), split=SplitSpec("after:middle", trainable=True)))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(whole, leaves, strict=True))


def test_weights_of_both_sides_made_of_one_leaf_are_told_before_anything_walks_back() -> None:
    model, leaves = made("enter leave")
    runtime = prepare_split(model, (X,), split=SplitSpec("after:middle", trainable=True))
    with pytest.raises(TrainingError, match="is computed from a leaf whose gradient the other side"):
        step(runtime)
    model(X).sum().backward()  # as it could before
    assert all(leaf.grad is not None for leaf in leaves)


class Held(nn.Module):
    """A leaf that is no parameter, of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale, self.more = torch.randn(6, requires_grad=True), [torch.randn(6, requires_grad=True)]
        self.register_buffer("shift", torch.randn(6, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.enter(x) * self.scale + self.shift * self.more[0]).relu()
        return self.leave(y * self.scale + self.shift * self.more[0])


def test_a_leaf_that_is_no_parameter_gets_its_gradient_at_once_from_both_sides() -> None:
    torch.manual_seed(0)
    model = Held()
    leaves = [model.scale, model.shift, model.more[0]]
    runtime = prepare_split(model, (X,), split=SplitSpec("after:middle", trainable=True))
    found = []
    for one in (lambda: model(X).square().sum().backward(), lambda: step(runtime)):
        calls = []
        handles = [leaf.register_hook(calls.append) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = leaf.detach() * 3
        one()
        found.append([leaf.grad for leaf in leaves])
        assert len(calls) == len(leaves)
        for handle in handles:
            handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
