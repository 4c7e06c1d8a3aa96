"""Memory of both sides: a weight that gets no gradient after the cut, and weights that are views of one memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ariadne import SplitSpec, load, prepare_split
from ariadne.errors import TrainingError


class Reused(nn.Module):
    """A layer that is called again after the cut, where it may get no gradient."""

    def __init__(self, again: Callable[[Any, Tensor, Tensor], Tensor], python: bool) -> None:
        super().__init__()
        self.a, self.b, self.again, self.python = nn.Linear(6, 6), nn.Linear(6, 3), again, python

    def forward(self, x: Tensor) -> Tensor:
        if self.python:
            random.random()  # so that no graph holds
        return self.b(self.again(self, self.a(x), x))


def gated(m: Reused, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.a(x.flip(0)).sigmoid()
    return h * gate


def detached(m: Reused, h: Tensor, x: Tensor) -> Tensor:
    return h * m.a(x).detach()


def as_often_as_data_say(m: Reused, h: Tensor, x: Tensor) -> Tensor:
    return m.a(h) if h.sum() > 1e6 else h


@pytest.mark.parametrize("python", [False, True], ids=["graph", "python"])
@pytest.mark.parametrize("again", [gated, detached, as_often_as_data_say], ids=lambda f: f.__name__)
def test_a_weight_of_both_sides_is_cleared_where_the_suffix_gives_it_nothing(again: Any, python: bool) -> None:
    """In a Python split its gradients added up over all steps."""
    torch.manual_seed(0)
    whole = Reused(again, python)
    split = copy.deepcopy(whole)
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    cut = "after:a" if again is as_often_as_data_say else "after:a#1"
    runtime = prepare_split(split, (x,), split=SplitSpec(cut, trainable=True), fallback="python")
    front = runtime.prefix_parameters()
    first = torch.optim.SGD(front, 0.1)
    last = torch.optim.SGD([p for p in runtime.suffix_parameters() if not any(p is q for q in front)], 0.1)
    other = torch.optim.SGD(whole.parameters(), 0.1)
    for _ in range(3):
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, y, loss_fn=F.cross_entropy, optimizer=last)
        runtime.backward_prefix(boundary, gradients, optimizer=first)
        other.zero_grad()
        expected = F.cross_entropy(whole(x), y)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected)
        for p, q in zip(whole.parameters(), split.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
            assert torch.equal(p, q)


class Slices(nn.Module):
    """What the part before the cut reads has the memory of a weight after it."""

    def __init__(self, made: Callable[[Any], None]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        made(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if hasattr(self, "table"):
            h = F.linear(h, self.table)
        return self.c(self.b(h.tanh()).tanh())


def transposed(m: Any) -> None:
    m.c.weight.data = m.a.weight.data.t()


def a_buffer(m: Any) -> None:
    m.register_buffer("table", m.c.weight.data[:6, :6])


def an_attribute(m: Any) -> None:
    m.table = m.c.weight.detach()


def a_parameter(m: Any) -> None:
    m.table = nn.Parameter(m.c.weight.data[:6])


@pytest.mark.parametrize("made", [transposed, a_buffer, an_attribute, a_parameter], ids=lambda f: f.__name__)
def test_the_optimizer_of_the_suffix_steps_no_memory_of_the_prefix(made: Any) -> None:
    """It stepped before the prefix went back through the very memory, without a word."""
    torch.manual_seed(0)
    model, x = Slices(made), torch.randn(3, 6)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:b", trainable=True))
    front = {id(p) for p in runtime.prefix_parameters()}
    boundary = runtime.run_training_prefix(x)
    last = torch.optim.SGD([p for p in runtime.suffix_parameters() if id(p) not in front], 0.1)
    with pytest.raises(TrainingError, match="whose memory is also that of another tensor"):
        runtime.train_suffix(boundary, x, loss_fn=F.mse_loss, optimizer=last)
    loss, gradients = runtime.train_suffix(boundary, x, loss_fn=F.mse_loss)
    runtime.backward_prefix(boundary, gradients)
    mine = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    expected = F.mse_loss(model(x), x)
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(
        p.grad is not None and g is not None and torch.equal(g, p.grad)
        for g, p in zip(mine, model.parameters(), strict=True)
    )


def test_memory_that_two_weights_get_after_a_step_is_looked_at_again() -> None:
    torch.manual_seed(0)
    model, x = Slices(lambda m: None), torch.randn(3, 6)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:b", trainable=True))
    first, last = (torch.optim.SGD(p, 0.1) for p in (runtime.prefix_parameters(), runtime.suffix_parameters()))
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, x, loss_fn=F.mse_loss, optimizer=last)
    runtime.backward_prefix(boundary, gradients, optimizer=first)
    transposed(model)
    boundary = runtime.run_training_prefix(x)
    with pytest.raises(TrainingError, match="whose memory is also that of another tensor"):
        runtime.train_suffix(boundary, x, loss_fn=F.mse_loss, optimizer=last)


def test_weights_beside_each_other_in_one_memory_are_stepped_by_two() -> None:
    """Flat memory for all parameters, as optimizers in one kernel have it: none is that of another."""
    torch.manual_seed(0)
    model, x = Slices(lambda m: None), torch.randn(3, 6)
    flat, at = torch.randn(200), 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    runtime = prepare_split(model, (x,), split=SplitSpec("after:b", trainable=True))
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(
        boundary, x, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(runtime.suffix_parameters(), 0.1)
    )
    runtime.backward_prefix(boundary, gradients, optimizer=torch.optim.SGD(runtime.prefix_parameters(), 0.1))
    assert loss.isfinite()


class Forces(nn.Module):
    """It runs with gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, at: Tensor) -> tuple[Tensor, Tensor]:
        at = at.detach().requires_grad_()
        energy = self.b(self.a(at).tanh()).flatten(1).sum(1)
        return energy, -torch.autograd.grad(energy.sum(), at, create_graph=True)[0]


@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=["flat", "atoms"])
def test_a_forward_that_runs_with_gradients_alone_is_learnt_and_saved(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Torch's error about an element without a gradient came out; and what a view's derivative calls, no file might name."""
    torch.manual_seed(0)
    model = Forces()
    runtime = prepare_split(model, (torch.randn(2, *shape),), split=SplitSpec("after:a", trainable=True))
    runtime.learn((torch.randn(5, *shape),))
    paths = [tmp_path / side for side in ("prefix", "suffix")]
    for path in paths:
        runtime.save(path, side=path.name, examples=[(torch.randn(5, *shape),)])
    prefix, suffix = map(load, paths)
    x = torch.randn(3, *shape)
    boundary = prefix.run_training_prefix(x)
    _, gradients = suffix.train_suffix(boundary, loss_fn=lambda o, _: o[0].mean() + o[1].square().sum())
    prefix.backward_prefix(boundary, gradients)
    energy, forces = model(x)
    (energy.mean() + forces.square().sum()).backward()
    for half in (prefix, suffix):
        for name, p in half.named_parameters():
            expected = model.get_parameter(name)
            assert torch.equal(*(torch.zeros(()) if t.grad is None else t.grad for t in (p, expected)))
