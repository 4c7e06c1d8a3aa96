"""What forward makes of weights at its first call is left on the model by a split's first call: both go on with that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split, validate_dynamic_batches
from ariadne.errors import ModuleError
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Net(nn.Module):
    """Two layers, the second by a weight that is kept in some way."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last, self.keep = nn.Linear(4, 4), nn.Linear(4, 4), keep
        self.held: Any = None
        self.table: dict[str, Tensor] = {}
        self.items: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows = x.shape[0]
        return F.linear(self.first(x), self.last.weight) * self.keep(self)


def in_attribute(self: Any) -> Any:
    if self.held is None:
        self.held = self.last.weight.detach().half().float().sum()
    return self.held


def absent(self: Any) -> Any:
    if not hasattr(self, "made"):
        self.made = self.last.weight.detach().clone()
        self.made.mul_(2)
    return self.made.sum()


def in_dict(self: Any) -> Any:
    if "w" not in self.table:
        self.table["w"] = self.last.weight.detach() * 1
    return self.table["w"].mean()


def in_list(self: Any) -> Any:
    if not self.items:
        self.items.append(self.last.weight.detach().norm())
    return self.items[0]


def two(self: Any) -> Any:
    if self.held is None:
        with torch.no_grad():
            self.held = self.last.weight.chunk(2)[0].sum(), {"b": self.first.bias + 1}
    return self.held[0] * self.held[1]["b"]


def view(self: Any) -> Any:
    if self.held is None:
        self.held = self.last.weight.detach()
    return self.held.sum()


def number(self: Any) -> Any:
    if self.held is None:
        self.held = float(self.last.weight.detach().max())
    return self.held


KEPT = (in_attribute, absent, in_dict, in_list, two, view)


def both(keep: Callable[[Any], Any]) -> tuple[Net, Any]:
    torch.manual_seed(0)
    whole = Net(keep).eval()
    return whole, prepare_split(copy.deepcopy(whole), (X,), split=SplitSpec("after:first", dynamic_batch=(1, 4)))


def call(split: Any) -> Tensor:
    return split.run_suffix(split.run_prefix(X))


def double(*models: nn.Module) -> None:
    with torch.no_grad():
        for model in models:
            model.last.weight = nn.Parameter(model.last.weight * 2)
            model.first.bias.mul_(3)


@torch.no_grad()
@pytest.mark.parametrize("keep", KEPT, ids=lambda keep: keep.__name__)
def test_a_split_goes_on_with_what_its_first_call_made(keep: Callable[[Any], Any]) -> None:
    whole, split = both(keep)
    before = {name: {*vars(m)} for name, m in whole.named_modules()}
    assert {name: {*vars(m)} for name, m in split.model.named_modules()} == before
    double(whole, split.model)  # before a first call it is as if it had always been so
    assert torch.equal(whole(X), call(split))
    double(whole, split.model)
    copied, twin = copy.deepcopy(split), copy.deepcopy(whole)
    for _ in range(2):
        assert torch.equal(whole(X), call(split))
        double(whole, split.model)
    assert torch.equal(twin(X), call(copied))
    assert torch.equal(twin(X), copied.model(X))
    assert torch.equal(whole(X), split.model(X))


@pytest.mark.parametrize("keep", KEPT, ids=lambda keep: keep.__name__)
def test_a_split_trains_with_what_its_first_step_made(keep: Callable[[Any], Any]) -> None:
    whole, split = both(keep)
    steps = [torch.optim.SGD(model.parameters(), 0.01) for model in (whole, split.model)]
    for _ in range(3):
        for step in steps:
            step.zero_grad()
        loss = whole(X).pow(2).mean()
        loss.backward()
        boundary = split.run_training_prefix(X)
        found, gradients = split.train_suffix(boundary, loss_fn=lambda y, t: y.pow(2).mean())
        split.backward_prefix(boundary, gradients)
        assert torch.equal(loss, found)
        for step in steps:
            step.step()
        for mine, theirs in zip(split.model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@torch.no_grad()
def test_a_number_that_python_read_of_a_weight_is_not_left() -> None:
    whole, split = both(number)
    assert torch.equal(whole(X), call(split))
    double(split.model)
    with pytest.raises(ModuleError, match=r"at its first call, and keeps it; that was changed since"):
        call(split)


def test_what_has_a_graph_is_not_left() -> None:
    def keep(self: Any) -> Any:
        if self.held is None:
            self.held = self.last.weight.sum()
        return self.held

    _, split = both(keep)
    boundary = split.run_training_prefix(X)
    split.train_suffix(boundary, loss_fn=lambda y, t: y.sum())
    assert split.model.held is None
    double(split.model)
    with pytest.raises(ModuleError, match=r"at its first call, and keeps it; that was changed since"):
        split.run_training_prefix(X)


@torch.no_grad()
def test_what_follows_the_batch_is_not_left() -> None:
    def keep(self: Any) -> Any:
        if self.rows not in self.table:
            self.table[self.rows] = self.last.weight.detach()[: self.rows].mean()
        return self.table[self.rows]

    whole, split = both(keep)
    assert torch.equal(whole(X), call(split))
    assert not split.model.table
    double(split.model)
    with pytest.raises(ModuleError, match=r"at its first call, and keeps it; that was changed since"):
        call(split)


@torch.no_grad()
def test_neither_preparing_nor_learning_nor_validating_leaves_anything() -> None:
    whole, split = both(in_attribute)
    split.learn((X,))
    validate_dynamic_batches(split, (X,), [1, 3])
    assert split.model.held is None
    copied = copy.deepcopy(split)
    double(whole, split.model, copied.model)
    for one in (split, copied):
        assert torch.equal(whole(X), call(one))


def with_a_number(self: Any) -> Any:
    if self.held is None:
        self.held, self.scale = self.last.weight.detach().sum(), 2.0
    return self.held * self.scale


def with_a_table(self: Any) -> Any:
    if self.held is None:
        self.held, self.other = self.last.weight.detach().sum(), torch.arange(4.0)
    return self.held * self.other


@torch.no_grad()
@pytest.mark.parametrize("keep", [with_a_number, with_a_table], ids=lambda keep: keep.__name__)
def test_what_a_first_call_leaves_is_left_whole_or_not_at_all(keep: Callable[[Any], Any]) -> None:
    whole, split = both(keep)
    assert torch.equal(whole(X), call(split))
    assert split.model.held is None
    double(split.model)
    with pytest.raises(ModuleError, match=r"at its first call, and keeps it; that was changed since"):
        call(split)


@torch.no_grad()
def test_two_things_are_left_together() -> None:
    def keep(self: Any) -> Any:
        if self.held is None:
            self.held, self.more = self.last.weight.detach().sum(), {"a": self.first.bias.detach() + 1}
        return self.held * self.more["a"]

    whole, split = both(keep)
    double(whole, split.model)
    for _ in range(3):
        assert torch.equal(whole(X), call(split))
        double(whole, split.model)
    assert torch.equal(whole.more["a"], split.model.more["a"])


@torch.no_grad()
def test_what_is_made_under_autocast_is_made_so_again() -> None:
    def keep(self: Any) -> Any:
        if self.held is None:
            with torch.autocast("cpu", torch.bfloat16):
                self.held = (self.last.weight.detach() @ self.last.weight.detach()).sum()
        return self.held

    whole, split = both(keep)
    for _ in range(3):
        assert torch.equal(whole(X), call(split))
        double(whole, split.model)
    assert torch.equal(whole.held, split.model.held)
