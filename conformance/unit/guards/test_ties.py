"""Weights that forward compares, by which they are, with those that containers and objects hold."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from ariadne.guards import ties
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)
OUTSIDE: list[Any] = []


class Net(nn.Module):
    """Two layers, whose last weight stands in many places."""

    def __init__(self, asks: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), asks
        self.hold(self.last.weight)

    def hold(self, w: Tensor) -> None:
        self.list, self.dict, self.tuple, self.deep = [w], {"w": w}, (w,), [[w]]
        self.object, self.set, self.deque = types.SimpleNamespace(w=w), {w}, deque([w])
        self.keys, self.ids, self.alias = {w: 2}, {id(w): 2}, w.detach()
        self.same = [self.alias]
        OUTSIDE[:] = [w]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * self.asks(self)


ASKS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda m: 2 if m.last.weight is m.list[0] else 1,
    "a dict": lambda m: 2 if m.last.weight is m.dict["w"] else 1,
    "a tuple": lambda m: 2 if m.last.weight is m.tuple[0] else 1,
    "a list in a list": lambda m: 2 if m.last.weight is not m.deep[0][0] else 1,
    "an object": lambda m: 2 if id(m.last.weight) == id(m.object.w) else 1,
    "any of a deque": lambda m: 2 if any(m.last.weight is w for w in m.deque) else 1,
    "a set": lambda m: 2 if m.last.weight in m.set else 1,
    "the keys of a dict": lambda m: m.keys.get(m.last.weight, 1),
    "ids": lambda m: m.ids.get(id(m.last.weight), 1),
    "a global": lambda m: 2 if m.last.weight is OUTSIDE[0] else 1,
}


def call(split: Any) -> Tensor:
    return split.run_suffix(split.run_prefix(X))


@torch.no_grad()
@pytest.mark.parametrize("name", ASKS)
def test_another_weight_than_the_one_that_is_held_is_noticed(name: str) -> None:
    split = prepare_split(Net(ASKS[name]), (X,), split="after:first")
    weight = split.model.last.weight
    assert torch.equal(call(split), split.model(X))
    split.model.last.weight = nn.Parameter(weight.detach().clone())
    with pytest.raises(ModuleError, match="which tensors are one"):
        call(split)
    split.model.last.weight = weight
    assert torch.equal(call(split), split.model(X)), "as it was, it serves again"


@torch.no_grad()
def test_a_copy_that_holds_the_weight_of_the_original_is_noticed() -> None:
    split = prepare_split(Net(ASKS["a list"]), (X,), split="after:first")
    assert torch.equal(call(copied := copy.deepcopy(split)), copied.model(X))
    split = prepare_split(Net(ASKS["a global"]), (X,), split="after:first")
    with pytest.raises(ModuleError, match="which tensors are one"):
        call(copy.deepcopy(split))


@torch.no_grad()
def test_another_tensor_in_a_container_is_noticed() -> None:
    changes: dict[str, Callable[[Any, Tensor], Any]] = {
        "a list": lambda m, w: m.list.__setitem__(0, w),
        "a list in a list": lambda m, w: m.deep[0].__setitem__(0, w),
        "an object": lambda m, w: setattr(m.object, "w", w),
        "a set": lambda m, w: (m.set.clear(), m.set.add(w)),
    }
    for name, change in changes.items():
        split = prepare_split(Net(ASKS[name]), (X,), split="after:first")
        call(split)
        change(split.model, split.model.last.weight.detach().clone())
        with pytest.raises(ModuleError, match=r"which tensors are one|'set' of the model was a set of other things"):
            call(split)


@torch.no_grad()
def test_two_attributes_that_are_one_tensor_are_told_from_two() -> None:
    split = prepare_split(Net(lambda m: 2 if m.alias is m.same[0] else 1), (X,), split="after:first")
    call(split)
    split.model.alias = split.model.alias.clone()
    with pytest.raises(ModuleError, match="which tensors are one"):
        call(split)


@torch.no_grad()
def test_a_held_weight_that_is_compared_with_nothing_may_be_replaced() -> None:
    split = prepare_split(Net(lambda m: m.list[0].sum()), (X,), split="after:first")
    call(split)
    split.model.last.weight = nn.Parameter(split.model.last.weight.detach().clone())
    assert torch.equal(call(split), split.model(X))


@torch.no_grad()
def test_a_guard_that_does_not_look_into_containers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "_tensors_in", lambda label, value: iter(()))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_another_weight_than_the_one_that_is_held_is_noticed("a list")


def test_many_things_are_looked_at_and_far_ones() -> None:
    net = Net(ASKS["a list"])
    net.many, net.far = [[net.last.weight], *([i] for i in range(5000))], [net.last.weight]
    for _ in range(30):
        net.far = [net.far]
    for name in ("many", "far"):
        tied, weight = ties.Tied(net, [("", name)]), net.last.weight
        assert tied.asked()
        net.last.weight = nn.Parameter(weight.detach().clone())
        assert not tied.asked()
        net.last.weight = weight
        assert tied.asked()
