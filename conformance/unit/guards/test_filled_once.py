"""What forward makes of the model's tensors at its first call, and keeps: the model goes on with that, whatever becomes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitSpec
from ariadne.errors import ModuleError
from ariadne.guards.versions import VERSION
from ariadne.plan import storage_of
from conformance.unit.refusing import prepare_split
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
        return F.linear(self.first(x), self.last.weight) * self.keep(self)


def in_attribute(self: Any) -> Any:
    if self.held is None:
        self.held = self.last.weight.detach().half().float().sum()
    return self.held


def absent(self: Any) -> Any:
    if not hasattr(self, "made"):
        self.made = self.last.weight.detach().clone()
    return self.made.sum()


def in_dict(self: Any) -> Any:
    if "w" not in self.table:
        self.table["w"] = self.last.weight.detach() * 1
    return self.table["w"].mean()


def in_list(self: Any) -> Any:
    if not self.items:
        self.items.append(self.last.weight.detach().norm())
    return self.items[0]


def number(self: Any) -> Any:
    if self.held is None:
        self.held = float(self.last.weight.detach().max())
    return self.held


def array(self: Any) -> Any:
    if self.held is None:
        self.held = self.last.weight.detach().numpy().copy()
    return float(self.held.max())


def view(self: Any) -> Any:
    if self.held is None:
        self.held = self.last.weight.detach()
    return self.held.sum()


KEPT = {"absent": absent, "array": array, "attribute": in_attribute, "dict": in_dict, "list": in_list, "number": number}


def both(keep: Callable[[Any], Any]) -> tuple[Net, Any]:
    torch.manual_seed(0)
    whole = Net(keep).eval()
    return whole, prepare_split(copy.deepcopy(whole), (X,), split=SplitSpec("after:first", dynamic_batch=(1, 4)))


def call(split: Any) -> Tensor:
    return split.run_suffix(split.run_prefix(X))


def double(model: Net) -> None:
    with torch.no_grad():
        model.last.weight.mul_(2)


@torch.no_grad()
@pytest.mark.parametrize("kept", sorted(KEPT))
def test_what_was_made_of_a_weight_that_changed_since_is_refused_by_name(kept: str) -> None:
    whole, split = both(KEPT[kept])
    for model in (whole, split.model):
        double(model)  # before a first call it is as if it had always been so
    assert torch.equal(whole(X), call(split))
    assert torch.equal(whole(X), call(split))
    again = copy.deepcopy(split)
    double(again.model)
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call, and keeps it; that was changed since"):
        call(again)
    double(split.model)
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call, and keeps it; that was changed since"):
        call(split)
    split = prepare_split(split.model, (X,), split="after:first")
    assert torch.equal(split.model(X), call(split))


@torch.no_grad()
def test_a_view_of_a_weight_follows_it() -> None:
    whole, split = both(view)
    for _ in range(2):
        assert torch.equal(whole(X), call(split))
        for model in (whole, split.model):
            double(model)
    assert torch.equal(whole(X), call(split))
    split.model.last.weight = nn.Parameter(split.model.last.weight.clone())
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call"):
        call(split)


@torch.no_grad()
def test_a_model_that_was_called_before_keeps_what_it_made_then() -> None:
    whole, _ = both(in_dict)
    whole(X)
    split = prepare_split(copy.deepcopy(whole), (X,), split="after:first")
    assert torch.equal(whole(X), call(split))
    split = prepare_split(split.model, (X,), split="after:first")
    double(split.model)
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call"):
        call(split)


class Cleared(Net):
    """Its `train` forgets what it keeps, as those of vision transformers with a cache of biases do."""

    def train(self, mode: bool = True) -> Any:
        if mode and self.table:
            self.table = {}
        return super().train(mode)


@torch.no_grad()
def test_what_the_model_forgets_when_it_is_switched_is_made_anew() -> None:
    torch.manual_seed(0)
    whole = Cleared(in_dict).eval()
    split = prepare_split(copy.deepcopy(whole), (X,), split="after:first")
    for _ in range(2):
        assert torch.equal(whole(X), call(split))
        for model in (whole, split.model):
            model.train()
            double(model)
            model.eval()
        if VERSION is None:  # nothing else tells that a switch came: it is refused, and says so
            with pytest.raises(
                ModuleError, match=r"no dict tells whether the model's train\(\) has emptied that place"
            ):
                call(split)
            return
    assert torch.equal(whole(X), call(split))
    double(split.model)
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call"):
        call(split)


@torch.no_grad()
@pytest.mark.parametrize("called", [False, True])
def test_what_stands_there_or_is_written_beside_it_is_no_switch(called: bool) -> None:
    torch.manual_seed(0)
    model = Cleared(in_dict).eval()
    if called:  # before: then what it made stands there
        model(X)
    split = prepare_split(model, (X,), split="after:first")
    call(split)
    if not called:
        model.epoch = 3
    double(model)
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call"):
        call(split)


@torch.no_grad()
def test_the_same_values_loaded_again_change_nothing() -> None:
    whole, split = both(in_attribute)
    state = copy.deepcopy(whole.state_dict())
    for _ in range(2):
        assert torch.equal(whole(X), call(split))
        for model in (whole, split.model):
            double(model)
            model.load_state_dict(state)
    copied = copy.deepcopy(split)
    assert torch.equal(whole(X), call(copied))


@torch.no_grad()
def test_neither_a_copy_nor_what_is_learnt_is_a_call() -> None:
    for more in (False, True):
        whole, split = both(in_dict)
        if more:
            split.learn((X,))
        copied = copy.deepcopy(split)
        for model in (whole, split.model, copied.model):
            double(model)
        for _ in range(2):
            assert torch.equal(whole(X), call(split))
            assert torch.equal(whole(X), call(copied))


@torch.no_grad()
def test_a_number_that_was_read_of_nothing_is_not_made_of_what_else_was_read() -> None:
    def keep(self: Any) -> Any:
        if self.held is None:
            self.held = self.first.in_features**-0.5
        return self.held if float(self.last.weight.detach().sum()) < 1e6 else 2.0

    whole, split = both(keep)
    for _ in range(3):
        assert torch.equal(whole(X), call(split))
        for model in (whole, split.model):
            double(model)


LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "expand_as": lambda w: torch.arange(4.0).expand_as(w).mean(),
    "new_ones": lambda w: w.new_ones(4).cumsum(0).mean(),
    "type_as": lambda w: torch.arange(4).type_as(w).mean(),
    "zeros_like": lambda w: (torch.zeros_like(w) + 2.0).mean(),
}


@torch.no_grad()
@pytest.mark.parametrize("spelling", sorted(LIKE))
def test_what_is_only_like_a_weight_is_not_made_of_it(spelling: str) -> None:
    def keep(self: Any) -> Any:
        if self.held is None:
            self.held = LIKE[spelling](self.last.weight.detach())
        return self.held

    whole, split = both(keep)
    for _ in range(3):
        assert torch.equal(whole(X), call(split))
        for model in (whole, split.model):
            double(model)


@torch.no_grad()
def test_a_weight_made_like_another_tensor_is_made_of_it() -> None:
    def keep(self: Any) -> Any:
        if self.held is None:
            self.held = self.last.weight.detach().type_as(torch.zeros(1, dtype=torch.float64)).mean().float()
        return self.held

    _, split = both(keep)
    call(split)
    double(split.model)
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call"):
        call(split)


class Scaled(nn.Module):
    """A factor, of which the first call makes another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(numbers(4))
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.held is None:
            self.held = (self.factor * 2).detach()
        return self.last(self.first(x) * self.held)  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_weight_that_lies_where_the_old_one_lay_is_another() -> None:
    net = Scaled().eval()
    split = prepare_split(net, (X,), split="after:first")
    split.run_suffix(split.run_prefix(X))
    lay = storage_of(net.factor)
    del net.factor
    tried = [nn.Parameter(torch.ones(4))]
    while len(tried) < 2000 and storage_of(tried[-1]) != lay:  # whose address is free again, if nothing holds it
        tried.append(nn.Parameter(torch.ones(4)))
    net.factor = tried[-1]
    with pytest.raises(ModuleError, match="that was changed since"):
        split.run_prefix(X)
