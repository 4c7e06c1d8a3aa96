"""Two things of one kind that forward reads alike: what changes in the second is seen, as in the first."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.guards import around, calls
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)
LOGGERS = ("ariadne.test_two.first", "ariadne.test_two.second")


@dataclass(slots=True)
class Layer:
    """A configuration of a layer."""

    gain: float

    def twice(self) -> float:
        """Twice the gain."""
        return 2 * self.gain

    @property
    def half(self) -> float:
        """Half of it."""
        return self.gain / 2


class Deeper(Layer):
    """One with slots of its class's own above, and with a dict."""


class Table(dict[str, Any]):
    """A dict that can have attributes, too."""


def of_both(item: Any, attribute: Any) -> Table:
    """A dict with something under a name, and with an attribute of this name."""
    table = Table(gain=item)
    table.gain = attribute  # type: ignore[attr-defined]
    return table


def put(thing: Any, value: float = 7.0) -> None:
    """Give it another gain."""
    thing.gain = value


def times(a: float, by: float) -> float:
    """A function for partials."""
    return a * by


def two() -> list[Any]:
    """Two configurations."""
    return [Layer(1.0), Layer(2.0)]


def loggers() -> list[Any]:
    """Two loggers that write warnings."""
    found = [logging.getLogger(name) for name in LOGGERS]
    for logger in found:
        logger.setLevel(30)
    return found


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
# What the model holds, what forward computes with it, and what changes.
CASES: dict[str, Case] = {
    "in a list": (two, lambda c: c[0].gain + 3 * c[1].gain, lambda c: put(c[1])),
    "in a loop": (two, lambda c: sum(one.gain for one in c), lambda c: put(c[1])),
    "in a dict": (
        lambda: dict(zip("ab", two(), strict=True)),
        lambda c: c["a"].gain + c["b"].gain,
        lambda c: put(c["b"]),
    ),
    "of a derived class": (lambda: [Deeper(1.0), Deeper(2.0)], lambda c: c[0].gain + c[1].gain, lambda c: put(c[1])),
    "a bound method": (
        lambda: [Layer(1.0).twice, Layer(2.0).twice],
        lambda c: c[0]() + c[1](),
        lambda c: put(c[1].__self__),
    ),
    "a property": (two, lambda c: c[0].half + c[1].half, lambda c: put(c[1])),
    "copied": (two, lambda c: copy.copy(c[0]).gain + copy.copy(c[1]).gain, lambda c: put(c[1])),
    "attrgetter": (two, lambda c: sum(map(attrgetter("gain"), c)), lambda c: put(c[1])),
    "partial": (
        lambda: [partial(times, by=1.0), partial(times, by=2.0)],
        lambda c: c[0](1.0) + c[1](1.0),
        lambda c: c[1].keywords.update(by=7.0),
    ),
    "lists": (
        lambda: [[1.0, Layer(1.0)], [1.0, Layer(1.0)]],
        lambda c: c[0][0] + 3 * c[1][0],
        lambda c: c[1].__setitem__(0, 7.0),
    ),
    "attribute and item": (lambda: of_both(1.0, 2.0), lambda c: c.gain + 3 * c["gain"], put),
    "item and attribute": (lambda: of_both(1.0, 2.0), lambda c: c.gain + 3 * c["gain"], lambda c: c.update(gain=7.0)),
    "attribute and tensor": (lambda: of_both(torch.ones(4), 2.0), lambda c: c.gain * c["gain"], put),
    "loggers": (loggers, lambda c: sum(2.0 for one in c if one.isEnabledFor(10)), lambda c: c[1].setLevel(10)),
    "their levels": (
        loggers,
        lambda c: c[0].getEffectiveLevel() + c[1].getEffectiveLevel(),
        lambda c: c[1].setLevel(10),
    ),
}


class Net(nn.Module):
    """Two layers, and what stands in `held` between them."""

    def __init__(self, held: Any, reads: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last, self.held, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), held, reads

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() + self.reads(self.held))


def refused(name: str) -> None:
    """See a split go on with what is as it was, and refuse what changed."""
    make, reads, change = CASES[name]
    held = make()
    try:
        refuses_after(Net(held, reads), X, lambda: change(held))
    finally:
        for logger in LOGGERS:
            logging.getLogger(logger).setLevel(logging.NOTSET)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_a_change_in_the_second_is_refused(name: str) -> None:
    refused(name)


@torch.no_grad()
@pytest.mark.planted
@pytest.mark.parametrize("name", ["in a list", "partial", "lists"])
def test_a_guard_that_looks_at_one_thing_for_all_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_at", lambda module, keys, table: (0, keys[-1]))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(name)


@torch.no_grad()
@pytest.mark.planted
def test_a_search_that_looks_at_one_logger_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch = around.Surroundings._of_torch

    def once(self: around.Surroundings, frame: Any) -> bool:
        return of_torch(self, frame) and frame.f_code not in around._LOGGERS

    monkeypatch.setattr(around.Surroundings, "_of_torch", once)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused("loggers")
