"""A module that is added to a model after its split was prepared: it changes nothing where forward does not come to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne.guards.baseline
from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self.layer(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, asks: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last, self.asks = nn.Linear(4, 4), Inner(), nn.Linear(4, 3), asks
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.inner(self.first(x))
        for layer in self.layers:
            h = layer(h)
        return self.last((h if mask is None else h * mask) * self.asks(self))  # type: ignore[no-any-return]


def tried(net: Any) -> float:
    try:
        return float(net.adapter.weight.sum())
    except AttributeError:
        return 1.0


def through_all(net: Any) -> int:
    found: list[Any] = []
    net.apply(found.append)
    return len(found)


ASKS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: 1,
    "by hasattr": lambda net: 2 if hasattr(net, "adapter") else 1,
    "by trying": tried,
    "its parts": lambda net: len([*net.children()]),
    "its table": lambda net: 2 if "adapter" in net._modules else 1,
    "its dict": lambda net: len(vars(net)["_modules"]),
    "all modules": lambda net: len([*net.modules()]),
    "all parameters": lambda net: len([*net.parameters()]),
    "all, by a function": through_all,
    "what it has": lambda net: len(net.state_dict()),
    "what is in another": lambda net: len([*net.inner.children()]),
}
ADDS: dict[str, Callable[[Any], Any]] = {
    "to the model": lambda net: setattr(net, "adapter", nn.Linear(4, 4)),
    "to a part": lambda net: setattr(net.inner, "adapter", nn.Linear(4, 4)),
    "to a layer": lambda net: net.first.add_module("adapter", nn.Linear(4, 4)),
    "one of its own": lambda net: setattr(net, "adapter", net.first),
    "to a Sequential": lambda net: net.inner.row.add_module("adapter", nn.Linear(4, 4)),
    "to a ModuleList": lambda net: net.layers.append(nn.Linear(4, 4)),
}
REACHED = {(asks, "to a Sequential") for asks in ASKS}
REACHED |= {
    (asks, adds)
    for asks in ASKS
    if asks not in ("nothing", "what is in another")
    for adds in ("to the model", "one of its own")
}
REACHED |= {
    (asks, adds)
    for asks in ("all modules", "all parameters", "all, by a function", "what it has")
    for adds in ("to a part", "to a layer")
}
REACHED |= {("what is in another", "to a part"), ("its dict", "to a part")}  # by any name, and so in any part


def call(split: Any, x: Tensor = X) -> Tensor:
    found: Tensor = split.run_suffix(split.run_prefix(x))
    return found


@torch.no_grad()
@pytest.mark.parametrize("asks", ASKS)
def test_a_part_that_is_added_counts_where_forward_may_come_to_it(asks: str) -> None:
    begun = prepare_split(Net(ASKS[asks]), (X,), split="after:inner")
    for adds, add in ADDS.items():
        split = copy.deepcopy(begun)
        call(split)
        add(split.model)
        if (asks, adds) in REACHED:
            with pytest.raises(ModuleError, match=r"adapter|layers|parameters"):
                call(split)
            continue
        for x in (X, X[:1]):
            assert torch.equal(call(split, x), split.model(x)), adds
        assert torch.equal(call(copy.deepcopy(split)), split.model(X)), adds
        assert (
            len(split.plans) >= len(begun.plans) if adds == "to a ModuleList" else len(split.plans) == len(begun.plans)
        )


class Holds(nn.Module):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.inner, self.last, self.read = nn.Linear(4, 4), nn.Linear(4, 4), read
        self.layers, self.rows = nn.ModuleList([nn.Linear(4, 4)]), nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.by_name = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.read(self, self.inner(x)))
        return found


READS: dict[str, Any] = {
    "the first row": lambda s, h: h * s.rows[0],
    "the last row": lambda s, h: h * s.rows[-1],
    "all by name": lambda s, h: h * sum(s.by_name.values()),
    "the last layer": lambda s, h: s.layers[-1](h),
}


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_what_comes_after_others_in_a_list_is_followed(read: str) -> None:
    net = Holds(READS[read])
    split = prepare_split(net, (X,), split="after:inner")
    net.rows.append(nn.Parameter(torch.full((4,), 3.0)))
    net.by_name["b"] = nn.Parameter(torch.full((4,), 3.0))
    net.layers.append(nn.Linear(4, 4))
    assert torch.equal(call(split), net(X))


def test_a_step_with_a_part_that_was_added_is_the_models() -> None:
    split = prepare_split(Net(ASKS["nothing"]), (X,), split="after:inner")
    split.model.adapter = nn.Linear(4, 4)
    whole = copy.deepcopy(split.model)
    whole(X).sum().backward()
    boundary = split.run_training_prefix(X)
    _, gradients = split.train_suffix(boundary, loss_fn=lambda output, targets: output.sum())
    split.backward_prefix(boundary, gradients)
    for mine, theirs in zip(split.model.parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


@torch.no_grad()
def test_a_part_that_was_there_must_stay() -> None:
    split = prepare_split(Net(ASKS["nothing"]), (X,), split="after:inner")
    split.model.adapter = nn.Linear(4, 4)
    assert torch.equal(call(split), split.model(X))
    split.model.inner = Inner()
    with pytest.raises(ModuleError, match="'inner' was replaced, added or removed"):
        call(split)


@torch.no_grad()
@pytest.mark.planted
def test_if_any_module_might_grow_that_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ariadne.guards.baseline.Baseline, "_growing", lambda self, recordings: self.modules.keys())
    split = prepare_split(Net(ASKS["nothing"]), (X,), split="after:inner")
    split.model.inner.row.append(nn.Linear(4, 4))
    assert not torch.equal(call(split), split.model(X))
