"""Hooks of the caller's on saved tensors: they are called for the ops of a call, and not for runs of Ariadne's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ariadne import SplitSpec, prepare_split

X, Y = torch.arange(12.0).view(3, 4).cos(), torch.arange(6.0).view(3, 2).sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x)).tanh())


class Checkpointed(Net):
    """Has hooks of its own for a part, which torch's checkpoint enters."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda h: self.drop(h).tanh().sin(), self.first(x), use_reentrant=False))


class Drawing(Net):
    """Has no plan."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Counting:
    """Packs tensors as `how` says, and counts."""

    def __init__(self, how: str) -> None:
        self.how, self.packed, self.unpacked = how, 0, 0

    def __call__(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, t: Tensor) -> Any:
        self.packed += 1
        if self.how == "noise" and t.is_floating_point():
            return t + 1e-3 * torch.randn_like(t)
        return (t,) if self.how == "boxed" else t

    def unpack(self, t: Any) -> Tensor:
        self.unpacked += 1
        return t[0] if self.how == "boxed" else t


def trained(kind: type[Net], hooks: Callable[[], AbstractContextManager[Any]], split: bool, fallback: Any) -> Any:
    """Three steps under hooks, for two of which a plan is captured."""
    torch.manual_seed(0)
    random.seed(0)
    model = kind()
    runtime = prepare_split(model, (X,), split="after:first", fallback=fallback) if split else None
    for p in (0.1, 0.2, 0.3):
        model.drop.p = p
        torch.manual_seed(5)
        random.seed(5)
        with hooks():
            if runtime is None:
                F.mse_loss(model(X), Y).backward()
                continue
            boundary = runtime.run_training_prefix(X)
            _, gradients = runtime.train_suffix(boundary, Y, loss_fn=F.mse_loss)
            runtime.backward_prefix(boundary, gradients)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("how", ["as it is", "boxed", "noise"])
@pytest.mark.parametrize(("kind", "fallback"), [(Net, "refuse"), (Drawing, "python")])
def test_hooks_on_saved_tensors_run_as_in_the_whole_model(kind: type[Net], fallback: str, how: str) -> None:
    counts = Counting(how), Counting(how)
    whole, split = (trained(kind, c, by, fallback) for c, by in zip(counts, (False, True), strict=True))
    assert all(map(torch.equal, whole, split))
    assert counts[0].packed == counts[1].packed > 0
    assert counts[0].unpacked == counts[1].unpacked > 0


def test_a_part_that_forward_itself_checkpoints_is_as_before() -> None:
    """A plan saves what its ops save; a call that captures one calls the hooks as often as the next call."""
    counting = Counting("boxed")
    whole, split = (trained(Checkpointed, counting, by, "refuse") for by in (False, True))
    assert all(map(torch.equal, whole, split))
    runtime, packed = prepare_split(Checkpointed(), (X,), split="after:first"), []
    for _ in range(2):
        before = counting.packed
        with counting():
            runtime.run_training_prefix(X)
        packed.append(counting.packed - before)
    assert packed[0] == packed[1] > 0


def test_nested_hooks_stand_as_they_stood() -> None:
    outer, inner = Counting("boxed"), Counting("as it is")
    with outer(), inner():
        prepare_split(Net(), (X,), split=SplitSpec("after:first", trainable=True))
        assert outer.packed == inner.packed == 0
        kept = Y.clone().requires_grad_().square().sum()
    with outer():
        (Y.clone().requires_grad_().square().sum() + kept).backward()
    assert (outer.packed, inner.packed) == (1, 1)


@pytest.mark.parametrize("do", ["warmup", "learn"])
@pytest.mark.parametrize(("kind", "fallback"), [(Net, "refuse"), (Drawing, "python")])
def test_what_is_run_beforehand_calls_no_hooks(kind: type[Net], fallback: Any, do: str) -> None:
    counting = Counting("as it is")
    with counting():
        runtime = prepare_split(kind(), (X,), split=SplitSpec("after:first", trainable=True), fallback=fallback)
        runtime.warmup(X) if do == "warmup" else runtime.learn((X[:1],))
    assert not counting.packed


def test_tensors_that_are_kept_on_the_cpu_train() -> None:
    whole, split = (trained(Net, save_on_cpu, by, "refuse") for by in (False, True))
    assert all(map(torch.equal, whole, split))


def test_a_plan_is_captured_within_a_part_of_the_callers_under_checkpoint() -> None:
    """That runs again, and must save then what it saved before."""
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        model = Net()
        runtime = prepare_split(model, (X,), split="after:first") if split else None
        model.drop.p = 0.4
        torch.manual_seed(5)
        run = runtime.joined if runtime is not None else model
        checkpoint(run, X, use_reentrant=False).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
