"""What a global or a closure leads to, while the model holds the same thing in an attribute that forward does not read."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.guards.around import Surroundings
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)
HERE = sys.modules[__name__]


class Op:
    """Something with a method, and a function in its class."""

    by = staticmethod(abs)

    def __init__(self) -> None:
        self.k = 1.0

    def apply(self, h: Tensor) -> Tensor:
        return h * self.k


def by_key(h: Tensor, table: dict[str, float]) -> Tensor:
    return h * table["k"]


def by_attribute(h: Tensor, space: Any) -> Tensor:
    return h * space.k


def run(h: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    return f(h)


TABLE: dict[str, float] = {}
SPACE = types.SimpleNamespace()
ROW: list[float] = []
OP = Op()
NEST = types.SimpleNamespace()


def around_an_object() -> Callable[[Tensor], Tensor]:
    op = OP
    return lambda h: op.apply(h)


Case = tuple[Callable[[Tensor], Tensor], Callable[[], Any], Callable[[], Any]]
# What forward does, what the model holds beside, and what changes.
CASES: dict[str, Case] = {
    "method": (lambda h: OP.apply(h), lambda: OP, lambda: setattr(OP, "k", 2.0)),
    "method handed on": (lambda h: run(h, OP.apply), lambda: OP, lambda: setattr(OP, "k", 2.0)),
    "dict handed on": (lambda h: by_key(h, TABLE), lambda: TABLE, lambda: TABLE.update(k=2.0)),
    "dict asked by get": (lambda h: h * TABLE.get("k", 0.0), lambda: TABLE, lambda: TABLE.update(k=2.0)),
    "values of a dict": (lambda h: h * sum(v for v in TABLE.values()), lambda: TABLE, lambda: TABLE.update(k=2.0)),
    "global replaced": (lambda h: by_key(h, TABLE), lambda: TABLE, lambda: setattr(HERE, "TABLE", {"k": 2.0})),
    "namespace handed on": (lambda h: by_attribute(h, SPACE), lambda: SPACE, lambda: setattr(SPACE, "k", 2.0)),
    "sum of a list": (lambda h: h * sum(ROW), lambda: ROW, lambda: ROW.append(2.0)),
    "dict in a namespace": (lambda h: by_key(h, NEST.d), lambda: NEST.d, lambda: setattr(NEST, "d", {"k": 2.0})),
    "object in a namespace": (lambda h: NEST.o.apply(h), lambda: NEST, lambda: setattr(NEST.o, "k", 2.0)),
    "object in a closure": (lambda h: around_an_object()(h), lambda: OP, lambda: setattr(OP, "k", 2.0)),
    "function in a class": (lambda h: h * Op.by(-1.0), lambda: Op, lambda: setattr(Op, "by", lambda v: 2.0)),
}
HOLDERS: tuple[Callable[[Any, Any], None], ...] = (
    lambda model, thing: setattr(model, "held", thing),
    lambda model, thing: setattr(model.last, "held", thing),
    lambda model, thing: setattr(model, "held", {"in": thing}),
)


class Net(nn.Module):
    """Two layers, and what a case does between them."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


@pytest.fixture(autouse=True)
def things(monkeypatch: pytest.MonkeyPatch) -> None:
    """New ones for each test."""
    for name, thing in {"TABLE": {"k": 1.0}, "ROW": [1.0], "OP": Op(), "SPACE": types.SimpleNamespace(k=1.0)}.items():
        monkeypatch.setattr(HERE, name, thing)
    monkeypatch.setattr(HERE, "NEST", types.SimpleNamespace(d={"k": 1.0}, o=Op()))
    monkeypatch.setattr(Op, "by", staticmethod(abs))


def refused(name: str, hold: Callable[[Any, Any], None]) -> None:
    """See a split go on with what is as it was, and refuse what changed."""
    middle, held, change = CASES[name]
    model = Net(middle)
    hold(model, held())
    refuses_after(model, X, change)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_what_changes_is_refused_though_the_model_holds_it_too(name: str) -> None:
    refused(name, HOLDERS[[*CASES].index(name) % len(HOLDERS)])


@torch.no_grad()
@pytest.mark.variants
@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("name", CASES)
def test_by_whichever_holder(name: str, hold: Callable[[Any, Any], None]) -> None:
    refused(name, hold)


@torch.no_grad()
def test_a_guard_that_leaves_out_what_the_model_holds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, read = Surroundings._enter, Surroundings._read

    def only_others(self: Surroundings, value: Any, name: str) -> None:
        if not self.belongs(value):
            enter(self, value, name)

    def of_others(self: Surroundings, *args: Any) -> Iterator[Any]:
        return (one for one in read(self, *args) if not self.belongs(one.value))

    monkeypatch.setattr(Surroundings, "_enter", only_others)
    monkeypatch.setattr(Surroundings, "_read", of_others)
    monkeypatch.setattr(Surroundings, "_opened_outside", lambda *_: iter(()))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused("method", HOLDERS[0])
