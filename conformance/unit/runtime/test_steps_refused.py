"""Training steps that two halves can't take are refused before anything changes; what a backward pass does besides is followed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.boundary.payload import gradients_from_bytes, gradients_to_bytes
from ariadne.errors import TrainingError, UnsupportedError

SPEC = SplitSpec("after:a", trainable=True)


def squares(y: Tensor, _: Any) -> Tensor:
    """A loss."""
    return y.square().sum()


class Adding(torch.autograd.Function):
    """Adds to a list in each backward pass."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, log: list[int]) -> Tensor:
        ctx.log = log
        return h * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.log.append(1)
        return gradients[0], None


class Net(nn.Module):
    """Two layers and a list, to which something between them adds as gradients come."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.a, self.b, self.log, self.way = nn.Linear(4, 4), nn.Linear(4, 2), list[int](), way

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.way == "function":
            h = Adding.apply(h.tanh(), self.log)
        elif self.way == "hook" and h.requires_grad:
            log = self.log
            torch.autograd.graph.register_multi_grad_hook((h,), lambda gradients: log.append(1))
        return self.b(h)


class Kept(nn.Module):
    """Keeps a loss of what comes."""

    loss: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.square().mean()
        return x


def test_an_optimizer_that_needs_a_closure_is_refused_before_anything_changes() -> None:
    model = Net()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SPEC)
    boundary = runtime.run_training_prefix(torch.randn(3, 4))
    with pytest.raises(TrainingError, match=r"LBFGS.step\(\) needs a closure .* inside of a closure that clears"):
        runtime.train_suffix(boundary, loss_fn=squares, optimizer=torch.optim.LBFGS(runtime.suffix_parameters()))
    assert model.b.weight.grad is None
    adam = torch.optim.Adam(runtime.suffix_parameters())
    _, gradients = runtime.train_suffix(boundary, loss_fn=squares, optimizer=adam)
    with pytest.raises(TrainingError, match="needs a closure"):
        runtime.backward_prefix(boundary, gradients, optimizer=torch.optim.LBFGS(runtime.prefix_parameters()))
    runtime.backward_prefix(boundary, gradients)
    assert model.a.weight.grad is not None


def test_lbfgs_steps_around_both_halves_as_around_the_whole() -> None:
    model, x = Net(), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SPEC)
    mine, theirs = (torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, whole))

    def halves() -> Tensor:
        mine.zero_grad()
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, loss_fn=squares)
        runtime.backward_prefix(boundary, gradients)
        return loss

    def all_of_it() -> Tensor:
        theirs.zero_grad()
        loss = squares(whole(x), None)
        loss.backward()
        return loss

    mine.step(halves)  # type: ignore[arg-type]
    theirs.step(all_of_it)  # type: ignore[arg-type]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_graph_that_a_loss_from_bytes_walked_already_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), kept := Kept(), nn.Linear(4, 4)).requires_grad_(False)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="after:2")
    boundary = runtime.run_training_prefix(torch.randn(3, 4, requires_grad=True))
    sent = BoundaryPayload.from_bytes(boundary.to_bytes())
    _, gradients = runtime.train_suffix(sent, loss_fn=lambda y, _: squares(y, _) + kept.loss)
    with pytest.raises(TrainingError, match="was walked by train_suffix already"):
        runtime.backward_prefix(boundary, gradients_from_bytes(gradients_to_bytes(gradients)))


def test_a_backward_pass_that_changes_what_forward_hands_on_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the backward pass changes what forward reads or hands on"):
        prepare_split(Net("function"), (torch.randn(2, 4),), split=SPEC)


def test_a_hook_on_several_tensors_runs_where_one_of_them_is_the_cut() -> None:
    model, x = Net("hook"), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SPEC, fallback="python")
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, loss_fn=squares)
    runtime.backward_prefix(boundary, gradients)
    squares(whole(x), None).backward()
    assert model.log == whole.log == [1]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True))  # type: ignore[arg-type]


class Detaching(Net):
    """Makes a leaf of what comes to the cut, in place, and keeps it; `twice` uses it before."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.twice, self.n = twice, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1  # which no graph holds
        h = self.a(x)
        more = h.sum() if self.twice else 0
        self.kept = h.detach_().requires_grad_(True)
        return self.b(h) + more


def test_what_is_detached_in_place_after_the_cut_is_a_leaf_as_in_the_whole() -> None:
    model, x = Detaching(), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SPEC, fallback="python")
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, loss_fn=squares)
    runtime.backward_prefix(boundary, gradients)
    squares(whole(x), None).backward()
    assert model.kept.is_leaf
    assert torch.equal(model.kept.grad, whole.kept.grad)  # type: ignore[arg-type]
    assert model.a.weight.grad is None
    with pytest.raises(TrainingError, match="is used after the cut, and then detached in place"):
        prepare_split(Detaching(twice=True), (torch.randn(2, 4),), split=SPEC, fallback="python")
