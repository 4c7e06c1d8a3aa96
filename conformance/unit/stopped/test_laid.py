"""What stands in a model's tables, kept from one time to the next, is what stands there now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.stopped.laid import Laid, Tables


def model() -> Any:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Tanh()), nn.Linear(2, 2))
    net.count, net.seen = 0, []
    return net


def shown(tables: list[Tables]) -> list[Any]:
    """The same things, by which they are."""
    return [
        (
            [
                (path, name, id(it), [(key, id(value)) for key, value in was.items()])
                for path, name, it, was in t.copies
            ],
            [*map(id, t.registries)],
            [(where, id(value)) for where, value in t.holders],
            [(name, id(tensor)) for name, tensor in t.tensors],
        )
        for t in tables
    ]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "an attribute": lambda net: setattr(net, "count", 1),
    "a container": lambda net: setattr(net[1], "kept", {"a": 1}),
    "a tensor": lambda net: setattr(net[1][0], "plain", torch.ones(2)),
    "a parameter": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a buffer": lambda net: net[2].register_buffer("mean", torch.ones(2)),
    "a module": lambda net: net[1].append(nn.ReLU()),
    "another module": lambda net: net.__setitem__(0, nn.Linear(2, 2)),
    "a module less": lambda net: net.__delitem__(1),
    "a table": lambda net: net[1].__dict__.update(_modules=dict(net[1]._modules)),
    "a table of parameters": lambda net: net[0].__dict__.update(_parameters=dict(net[0]._parameters)),
    "a __dict__": lambda net: setattr(net[1], "__dict__", dict(net[1].__dict__)),
    "a hook": lambda net: net[0].register_forward_hook(lambda *args: None),
    "a flag": lambda net: net.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_is_what_stands_there_after_a_change(change: str) -> None:
    net, laid = model(), Laid()
    for _ in range(2):
        assert shown(laid.tables(net)) == shown(Laid().tables(net))
    CHANGES[change](net)
    for _ in range(2):
        assert shown(laid.tables(net)) == shown(Laid().tables(net))
    net.count += 1
    assert shown(laid.tables(net)) == shown(Laid().tables(net))


def told(laid: Laid, net: nn.Module) -> list[Any]:
    """What is made of the tables, by which things they are."""
    return [
        [(name, id(t)) for name, t in laid.state(net)],
        {name: id(t) for name, t in laid.bound(net).items()},
        laid.training(net),
        laid.averages(net),
        [[*map(id, one)] for one in laid.hung(laid.tables(net))],
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_made_of_what_is_kept_is_made_anew_after_a_change(change: str) -> None:
    net, laid = model(), Laid()
    assert told(laid, net) == told(laid, net) == told(Laid(), net)
    CHANGES[change](net)
    assert told(laid, net) == told(Laid(), net)
    net.eval(), net[1].train()
    assert told(laid, net) == told(Laid(), net)


def test_another_model_and_a_copy_have_tables_of_their_own() -> None:
    net, laid = model(), Laid()
    laid.tables(net)
    other = model()
    for one in (laid, copy.deepcopy(laid)):
        assert shown(one.tables(other)) == shown(Laid().tables(other))


def test_tables_that_are_not_looked_at_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, laid = model(), Laid()
    laid.tables(net)
    last = laid._last
    assert last is not None
    monkeypatch.setattr(Laid, "tables", lambda self, model: last.stood[0])
    net.count = 1
    assert shown(laid.tables(net)) != shown(laid._anew(net))
