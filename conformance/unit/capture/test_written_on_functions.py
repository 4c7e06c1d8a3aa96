"""What forward writes onto functions and Python modules that it reaches is followed, refused, and put back after a capture."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ariadne import prepare_split
from ariadne.errors import UnsupportedError
from conformance.unit.held_kit import Net
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


def a_function() -> Any:
    def act() -> None: ...

    return act


def a_module() -> Any:
    return types.ModuleType("settings_of_a_test")


def a_cached_function() -> Any:
    return cache(lambda: None)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.thing.calls += 1
    return x


def counts_in_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    for each in self.things:
        each.calls += 1
    return x


def counts_in_its_dict(self: Any, x: torch.Tensor) -> torch.Tensor:
    vars(self.thing)["calls"] += 1
    return x


def counts_by_a_name_in_a_variable(self: Any, x: torch.Tensor) -> torch.Tensor:
    name = self.name
    setattr(self.thing, name, getattr(self.thing, name) + 1)
    return x


def counts_on_what_it_holds(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.thing.inner.calls += 1
    return x


WAYS = (counts, counts_in_a_list, counts_in_its_dict, counts_by_a_name_in_a_variable, counts_on_what_it_holds)


def holding(make: Callable[[], Any], way: Any) -> tuple[Net, Any]:
    thing, inner = make(), make()
    thing.calls, inner.calls, thing.inner = 0, 0, inner
    return Net(way, thing=thing, things=[thing], name="calls"), thing


@pytest.mark.parametrize("make", [a_function, a_module, a_cached_function])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_count_there_is_refused_and_put_back(make: Callable[[], Any], way: Any) -> None:
    net, thing = holding(make, way)
    with pytest.raises(UnsupportedError, match="forward changes what is in"):
        prepare_split(net, (X,), split="after:a")
    assert thing.calls == thing.inner.calls == 0


@pytest.mark.parametrize("make", [a_function, a_module])
def test_what_each_call_sets_there_is_set_by_a_plan(make: Callable[[], Any]) -> None:
    def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.thing.rows = x.shape[0]
        self.thing.seen.append(x.shape[0])
        return x

    net, thing = holding(make, keeps)
    thing.rows, thing.seen = 0, []
    runtime = prepare_split(net, (X,), split="after:a")
    assert (thing.rows, thing.seen) == (0, [])
    runtime.run_suffix(runtime.run_prefix(numbers(3, 4)))
    assert (thing.rows, thing.seen) == (3, [3])
    net(X)
    assert (thing.rows, thing.seen) == (2, [3, 2])


def test_a_tensor_that_each_call_sets_there_is_set_by_a_plan() -> None:
    def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.thing.last = x.tanh()
        return x

    net, thing = holding(a_module, keeps)
    runtime = prepare_split(net, (X,), split="after:a")
    assert not hasattr(thing, "last")
    runtime.run_suffix(runtime.run_prefix(X))
    mine = thing.last
    net(X)
    assert mine is not thing.last
    assert torch.equal(mine, thing.last)
