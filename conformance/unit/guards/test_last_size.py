"""What forward makes of weights for a batch and keeps for it: a call that would go on with the old one is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import ModuleError
from ariadne.guards.versions import VERSION
from conformance.unit.trap_kit import numbers

X = {rows: numbers(rows, 4) for rows in (2, 3)}
KEPT = r"for the batch of a call, and keeps it .* was changed since"
NO_GRAPH = r"made .* in a call without gradients, and keeps it"


class Net(nn.Module):
    """Two layers, the second by a weight that is kept in some way."""

    def __init__(self, keep: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.first, self.last, self.keep = nn.Linear(4, 4), nn.Linear(4, 4), keep
        self.size: Any = None
        self.held: Any = None
        self.table: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), self.last.weight) * self.keep(self, x.shape[0])


def by_number(self: Any, rows: int) -> Any:
    if self.size != rows:
        self.size, self.held = rows, self.last.weight.detach()[:rows].sum()
    return self.held


def with_graph(self: Any, rows: int) -> Any:
    if self.size != rows:
        self.size, self.held = rows, self.last.weight[:rows].sum()
    return self.held


def in_dict_beside(self: Any, rows: int) -> Any:
    if self.size != rows:
        self.size, self.table = rows, {"w": self.last.weight.detach()[:rows].sum()}
    return self.table["w"]


def in_other_module(self: Any, rows: int) -> Any:
    if self.first.__dict__.get("size") != rows:
        self.first.size, self.last.held = rows, self.last.weight.detach()[:rows].sum()
    return self.last.held


def by_shape(self: Any, rows: int) -> Any:
    if self.size != (rows, 4):
        self.size, self.held = (rows, 4), self.last.weight.detach()[:rows].sum()
    return self.held


def of_sizes(self: Any, rows: int) -> Any:
    if self.size != rows:
        self.size, self.held = rows, torch.arange(rows).type_as(self.last.weight)[:, None] + 1
    self.last.seen = self.last.weight.detach() * 2  # as each call does
    return self.held * self.last.seen.sum()


def once(self: Any, rows: int) -> Any:
    if self.held is None:
        self.held = self.last.weight.sum()
    return self.held


def both(keep: Callable[[Any, int], Any]) -> tuple[Net, Any]:
    torch.manual_seed(0)
    whole = Net(keep)
    return whole, prepare_split(copy.deepcopy(whole), (X[2],), split=SplitSpec("after:first", dynamic_batch=(1, 4)))


def call(split: Any, rows: int) -> Tensor:
    return split.run_suffix(split.run_prefix(X[rows]))


def step(split: Any, rows: int) -> Tensor:
    boundary = split.run_training_prefix(X[rows])
    loss, gradients = split.train_suffix(boundary, loss_fn=lambda y, t: y.pow(2).mean())
    split.backward_prefix(boundary, gradients)
    return loss


def double(*models: nn.Module) -> None:
    for model in models:
        model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()})


@torch.no_grad()
@pytest.mark.parametrize(
    "keep", [by_number, with_graph, in_dict_beside, in_other_module], ids=lambda keep: keep.__name__
)
def test_a_call_of_the_same_batch_is_refused_and_one_of_another_is_not(keep: Callable[[Any, int], Any]) -> None:
    whole, split = both(keep)
    assert torch.equal(whole(X[2]), call(split, 2))
    double(whole, split.model)
    copied = copy.deepcopy(split)
    for one in (split, copied):
        with pytest.raises(ModuleError, match=KEPT):
            call(one, 2)
    for rows in (3, 2, 2):
        assert torch.equal(whole(X[rows]), call(split, rows))
    double(split.model)
    with pytest.raises(ModuleError, match=KEPT):
        call(split, 2)


@torch.no_grad()
def test_where_no_attribute_holds_the_batch_each_call_is_refused() -> None:
    whole, split = both(by_shape)
    for rows in (2, 3, 2):
        assert torch.equal(whole(X[rows]), call(split, rows))
    double(split.model)
    for rows in (2, 3):
        with pytest.raises(ModuleError, match=KEPT):
            call(split, rows)


def test_where_train_empties_the_place_a_step_makes_it_anew() -> None:
    class Emptying(Net):
        def train(self, mode: bool = True) -> Any:
            self.held = None
            return super().train(mode)

    whole = Emptying(once)
    split = prepare_split(copy.deepcopy(whole), (X[2],), split="after:first")
    for _ in range(2):
        for model in (whole.eval(), split.model.eval()):
            double(model)
        with torch.no_grad():
            assert torch.equal(whole(X[2]), call(split, 2))
        whole.train(), split.model.train()
        loss = whole(X[2]).pow(2).mean()
        loss.backward()
        if VERSION is None:  # nothing else tells that a switch came: it is refused, and says so
            with pytest.raises(
                ModuleError, match=r"no dict tells whether the model's train\(\) has emptied that place"
            ):
                step(split, 2)
            return
        assert torch.equal(loss, step(split, 2))
    assert torch.equal(whole.last.weight.grad, split.model.last.weight.grad)
    double(split.model)  # with no switch since
    for _ in range(2):
        with pytest.raises(ModuleError, match=r"at its first call, and keeps it; that was changed since"):
            step(split, 2)


@torch.no_grad()
def test_a_weight_that_is_as_it_was_is_no_change() -> None:
    whole, split = both(by_number)
    for _ in range(2):
        assert torch.equal(whole(X[2]), call(split, 2))
        split.model.load_state_dict(copy.deepcopy(split.model.state_dict()))


@pytest.mark.parametrize("keep", [by_number, with_graph], ids=lambda keep: keep.__name__)
def test_a_second_step_of_the_same_batch_is_refused(keep: Callable[[Any, int], Any]) -> None:
    whole, split = both(keep)
    loss = whole(X[2]).pow(2).mean()
    loss.backward()
    assert torch.equal(loss, step(split, 2))
    torch.optim.SGD(split.model.parameters(), 0.01).step()
    with pytest.raises(ModuleError, match=KEPT):
        step(split, 2)


@torch.no_grad()
def test_what_is_made_of_sizes_and_what_each_call_makes_anew_is_followed() -> None:
    whole, split = both(of_sizes)
    for rows in (2, 2, 3, 3, 2):
        assert torch.equal(whole(X[rows]), call(split, rows))
        double(whole, split.model)


@pytest.mark.parametrize("keep", [once, with_graph], ids=lambda keep: keep.__name__)
def test_a_call_without_gradients_keeps_what_has_none(keep: Callable[[Any, int], Any]) -> None:
    _, split = both(keep)
    for _ in range(2):
        with torch.no_grad():
            call(split, 2)
        with pytest.raises(ModuleError, match=NO_GRAPH):
            step(split, 2)
    if keep is with_graph:
        step(split, 3)


@pytest.mark.parametrize("keep", [once, with_graph], ids=lambda keep: keep.__name__)
def test_a_step_keeps_what_a_call_without_gradients_goes_on_with(keep: Callable[[Any, int], Any]) -> None:
    whole, split = both(keep)
    for _ in range(2):
        loss = whole(X[2]).pow(2).mean()
        loss.backward()
        assert torch.equal(loss, step(split, 2))
        with torch.no_grad():
            assert torch.equal(whole(X[2]), call(split, 2))
    for mine, theirs in zip(split.model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is theirs.grad or torch.equal(mine.grad, theirs.grad)
