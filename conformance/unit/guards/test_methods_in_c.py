"""Methods in C that are bound to something, views of dicts, partials of functions in C: what they would read is guarded."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

X = numbers(3, 4)
OUTSIDE = {"a": 1.0}
looked_up = OUTSIDE.get


class Net(nn.Module):
    """It multiplies by a number that it has from what `keep` sets up; `number` says how."""

    def __init__(self, keep: Callable[[Any], None], number: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.number = number
        keep(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu() * self.number(self))  # type: ignore[no-any-return]


class Held:
    """An object with one number."""

    def __init__(self) -> None:
        self.gain = 2.0


def keeps(**made: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Sets attributes, one after the other; each may be made of those before it."""

    def keep(net: Any) -> None:
        for name, make in made.items():
            setattr(net, name, make(net))

    return keep


def table(net: Any) -> dict[str, float]:
    return {"a": 1.0}


def put(net: Any) -> None:
    net.kept["a"] = 5.0


def append(net: Any) -> None:
    net.kept.append(9.0)


def write(net: Any) -> None:
    net.kept[0] = 5.0


def closed_over(net: Any) -> Callable[[], Any]:
    get = net.kept.get
    return lambda: get("a")


def by_default(net: Any) -> Callable[[], Any]:
    def asked(get: Any = net.kept.get) -> Any:
        return get("a")

    return asked


def outside(net: Any) -> None:
    OUTSIDE["a"] = 5.0


def set_gain(net: Any) -> None:
    net.kept.gain = 5.0


def another_factory(net: Any) -> None:
    net.kept.default_factory = lambda: 5.0


CASES: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any], Callable[[Any], None]]] = {
    "a dict's get": (keeps(kept=table, ask=lambda n: n.kept.get), lambda n: n.ask("a"), put),
    "a dict's get in a list": (keeps(kept=table, ask=lambda n: [n.kept.get]), lambda n: n.ask[0]("a"), put),
    "a dict's get in a closure": (keeps(kept=table, ask=closed_over), lambda n: n.ask(), put),
    "a dict's get by default": (keeps(kept=table, ask=by_default), lambda n: n.ask(), put),
    "a global's get": (keeps(), lambda n: looked_up("a"), outside),
    "a dict's own look-up": (keeps(kept=table, ask=lambda n: n.kept.__getitem__), lambda n: n.ask("a"), put),
    "a list's count": (keeps(kept=lambda n: [9.0], ask=lambda n: n.kept.count), lambda n: n.ask(9.0), append),
    "a set's contains": (
        keeps(kept=lambda n: {1}, ask=lambda n: n.kept.__contains__),
        lambda n: 1.0 + n.ask(2),
        lambda n: n.kept.add(2),
    ),
    "an array's item": (keeps(kept=lambda n: np.ones(1), ask=lambda n: n.kept.item), lambda n: n.ask(), write),
    "a dict's values": (keeps(kept=table, ask=lambda n: n.kept.values()), lambda n: sum(n.ask), put),
    "a dict's keys": (
        keeps(kept=table, ask=lambda n: n.kept.keys()),
        lambda n: len(n.ask),
        lambda n: n.kept.update(b=1.0),
    ),
    "a partial of get": (keeps(kept=table, ask=lambda n: partial(n.kept.get, "a")), lambda n: n.ask(), put),
    "a partial of getattr": (
        keeps(kept=lambda n: Held(), ask=lambda n: partial(getattr, n.kept, "gain")),
        lambda n: n.ask(),
        set_gain,
    ),
    "a partial of max": (keeps(kept=lambda n: [1.0], ask=lambda n: partial(max, n.kept)), lambda n: n.ask(), append),
    "a partial of getitem": (
        keeps(kept=table, ask=lambda n: partial(operator.getitem, n.kept, "a")),
        lambda n: n.ask(),
        put,
    ),
    "a factory of defaults": (
        keeps(kept=lambda n: defaultdict(lambda: 2.0, z=1.0)),
        lambda n: copy.copy(n.kept)["new"],
        another_factory,
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_it_reads_is_guarded(name: str) -> None:
    keep, number, change = CASES[name]
    OUTSIDE["a"] = 1.0
    model = Net(keep, number).eval()
    split = prepare_split(model, (X[:2],), split="percent:50")
    same(model(X), split.run_suffix(split.run_prefix(X)))
    before = model(X)
    change(model)
    assert not torch.equal(model(X), before)
    with pytest.raises(ModuleError):
        split.run_suffix(split.run_prefix(X))


def test_another_weight_in_the_place_of_the_one_whose_method_is_kept() -> None:
    model = Net(keeps(kept=lambda n: n.last.weight.mul), lambda n: n.kept(2.0)[0]).eval()
    split = prepare_split(model, (X[:2],), split="percent:50")
    same(model(X), split.run_suffix(split.run_prefix(X)))
    model.last.weight = nn.Parameter(torch.ones(4, 4))
    same(model(X), split.run_suffix(split.run_prefix(X)))


def test_functions_in_c_and_draws_are_no_methods_of_something_kept() -> None:
    keep = keeps(ask=lambda n: torch.sigmoid, more=lambda n: np.random.rand, add=lambda n: partial(torch.mul, other=2))
    model = Net(keep, lambda n: n.add(n.ask(n.last.bias))).eval()
    split = prepare_split(model, (X[:2],), split="percent:50")
    np.random.rand(3)
    same(model(X), split.run_suffix(split.run_prefix(X)))
