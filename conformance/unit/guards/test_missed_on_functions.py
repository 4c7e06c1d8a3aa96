"""An attribute that a function or a Python module does not have when forward asks for it must not come to stand there unseen."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ariadne.errors import ModuleError
from conformance.unit.held_kit import Net
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

X = numbers(2, 4)


def a_function() -> Any:
    def act() -> None: ...

    return act


def a_module() -> Any:
    return types.ModuleType("settings_of_a_test")


def in_a_list(thing: Any) -> Net:
    def middle(self: Any, x: torch.Tensor) -> torch.Tensor:
        for each in self.things:
            x = x * getattr(each, "gain", 1.0)
        return x

    return Net(middle, things=[thing])


def in_a_closure(thing: Any) -> Net:
    things = [thing]

    def gain() -> Any:
        return getattr(things[0], "gain", 1.0)

    return Net(lambda self, x: x * gain())


def as_a_default(thing: Any) -> Net:
    def middle(self: Any, x: torch.Tensor, thing: Any = thing) -> torch.Tensor:
        return x * thing.gain if hasattr(thing, "gain") else x

    return Net(middle)


def of_a_partial(thing: Any) -> Net:
    return Net(lambda self, x: x * self.gain(), gain=partial(lambda thing: getattr(thing, "gain", 1.0), thing))


def through_its_dict(thing: Any) -> Net:
    return Net(lambda self, x: x * self.thing.__dict__.get("gain", 1.0), thing=thing)


def by_a_name_in_a_variable(thing: Any) -> Net:
    def middle(self: Any, x: torch.Tensor) -> Any:
        name = self.name
        return x * getattr(self.thing, name, 1.0)

    return Net(middle, thing=thing, name="gain")


def by_a_name_that_is_made(thing: Any) -> Net:
    return Net(lambda self, x: x * getattr(self.thing, "ga" + self.end, 1.0), thing=thing, end="in")


WAYS = (
    in_a_list, in_a_closure, as_a_default, of_a_partial, through_its_dict, by_a_name_in_a_variable, by_a_name_that_is_made,
)  # fmt: skip


@pytest.mark.parametrize("make", [a_function, a_module])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_comes_to_stand_on_a_function_or_a_module_is_seen(
    way: Callable[[Any], Net], make: Callable[[], Any]
) -> None:
    thing = make()
    net = way(thing)
    runtime = prepare_split(net, (X,), split="after:a")
    if way not in (through_its_dict, by_a_name_that_is_made):  # which may read any name
        thing.unread = 3.0
        same(net(X), runtime.run_suffix(runtime.run_prefix(X)))
    thing.gain = 3.0
    with pytest.raises(ModuleError, match="gain"):
        runtime.run_suffix(runtime.run_prefix(X))
    del thing.gain
    same(net(X), runtime.run_suffix(runtime.run_prefix(X)))


def test_a_number_on_a_function_that_is_asked_for_by_a_made_name_is_seen() -> None:
    thing = a_function()
    thing.gain = 2.0
    net = by_a_name_that_is_made(thing)
    runtime = prepare_split(net, (X,), split="after:a")
    thing.gain = 3.0
    with pytest.raises(ModuleError, match="gain"):
        runtime.run_suffix(runtime.run_prefix(X))


def test_what_forward_sets_on_a_function_itself_is_no_change() -> None:
    thing = a_function()

    def middle(self: Any, x: torch.Tensor) -> torch.Tensor:
        vars(self.thing)["last"] = x.shape[1]
        return x.relu()

    net = Net(middle, thing=thing)
    runtime = prepare_split(net, (X,), split="after:a")
    for _ in range(2):
        same(net(X), runtime.run_suffix(runtime.run_prefix(X)))
