"""Containers outside of the model that forward reads by a key, and then as a whole: what was added is noticed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError
from ariadne.guards import around, baseline, watched
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

TABLE, LIST = {"one": 2.0}, [2.0]
NESTED: dict[str, Any] = {"table": {"one": 2.0}, "list": [2.0]}
SPACE = types.SimpleNamespace(table={"one": 2.0}, list=[2.0])
X = numbers(2, 4)


class Config:
    table, list = {"one": 2.0}, [2.0]


def one() -> float:
    return NESTED["table"]["one"]


def many() -> int:
    return len(NESTED["table"])


TABLES: dict[str, tuple[Callable[[], float], Callable[[], dict[str, float]]]] = {
    "a global": (lambda: TABLE["one"] * len(TABLE), lambda: TABLE),
    "a global, asked for a key": (lambda: TABLE["one"] * (3 if "two" in TABLE else 1), lambda: TABLE),
    "one in a dict": (lambda: NESTED["table"]["one"] * len(NESTED["table"]), lambda: NESTED["table"]),
    "the dict that holds it": (lambda: NESTED["table"]["one"] * len(NESTED), lambda: NESTED),
    "one of an object": (lambda: SPACE.table["one"] * len(SPACE.table), lambda: SPACE.table),
    "one of a class": (lambda: Config.table["one"] * len(Config.table), lambda: Config.table),
    "in two functions": (lambda: one() * many(), lambda: NESTED["table"]),
}
LISTS: dict[str, tuple[Callable[[], float], Callable[[], list[float]]]] = {
    "a global": (lambda: LIST[0] * len(LIST), lambda: LIST),
    "one in a dict": (lambda: NESTED["list"][0] * len(NESTED["list"]), lambda: NESTED["list"]),
    "one of an object": (lambda: SPACE.list[0] * len(SPACE.list), lambda: SPACE.list),
    "one of a class": (lambda: Config.list[0] * len(Config.list), lambda: Config.list),
}


class Net(nn.Module):
    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * self.scale())


def run(split: SplitRuntime) -> torch.Tensor:
    out: torch.Tensor = split.run_suffix(split.run_prefix(X))
    return out


@pytest.mark.parametrize("name", TABLES)
def test_with_another_entry_in_a_dict_a_call_is_captured_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale, table = TABLES[name]
    model = Net(scale)
    split = prepare_split(model, (X,), split="50%")
    same(model(X), run(split), "at first")
    monkeypatch.setitem(table(), "two", 3.0)
    same(model(X), run(split), "with another entry")


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_has_grown_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale, numbers_in = LISTS[name]
    split = prepare_split(Net(scale), (X,), split="50%")
    numbers_in().append(3.0)
    try:
        with pytest.raises(ModuleError, match=r"was a list of \[2.0\].*now it is a list of \[2.0, 3.0\]"):
            run(split)
    finally:
        numbers_in().pop()


@pytest.mark.planted
def test_where_the_first_read_hides_the_second_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (around, baseline, watched):
        monkeypatch.setattr(module, "add_to", lambda found, new: found.setdefault(new.place, new))
    model = Net(lambda: TABLE["one"] * len(TABLE))
    split = prepare_split(model, (X,), split="50%")
    monkeypatch.setitem(TABLE, "two", 3.0)
    assert not torch.equal(run(split), model(X))
