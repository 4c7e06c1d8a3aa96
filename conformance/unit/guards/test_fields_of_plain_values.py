"""Numbers, texts, tuples and arrays of classes of their own, whose attributes forward reads: a change of one is refused."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne.guards import attributes
from ariadne.guards.versions import VERSION
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)


class Size(collections.namedtuple("Size", "height width")):
    """A named tuple that can have further attributes."""


class Degrees(float):
    """A number that can have attributes."""

    k: float


class Count(int):
    """Another."""


class Tagged(str):
    """A text that can."""


class Slotted(float):
    """A number with a slot."""

    __slots__ = ("k",)


class Array(np.ndarray):  # type: ignore[type-arg]
    """An array that can."""


def having(thing: Any) -> Any:
    """The same with an attribute."""
    thing.k = 1.0
    return thing


MAKE: dict[str, Callable[[], Any]] = {
    "named tuple": lambda: Size(1, 2),
    "float": lambda: Degrees(1.0),
    "int": lambda: Count(1),
    "text": lambda: Tagged("x"),
    "slot": lambda: Slotted(1.0),
    "array": lambda: np.zeros(2).view(Array),
}
ANGLE, AREA = Degrees(1.0), Size(1, 2)


class Net(nn.Module):
    """Two layers, and what stands in `held` between them."""

    def __init__(self, held: Any, reads: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last, self.held, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), held, reads

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.reads(self.held))


def put(thing: Any) -> None:
    """Change it."""
    thing.k = 3.0


def refused(name: str) -> None:
    """See a split go on with what is as it was, and refuse what changed."""
    held = having(MAKE[name]())
    refuses_after(Net(held, lambda c: c.k), X, lambda: put(held))


@torch.no_grad()
@pytest.mark.parametrize("name", MAKE)
def test_a_change_of_one_is_refused(name: str) -> None:
    refused(name)


@torch.no_grad()
def test_a_change_of_the_second_in_a_list_is_refused() -> None:
    held = [having(Degrees(1.0)), having(Degrees(1.0))]
    refuses_after(Net(held, lambda c: c[0].k + 3 * c[1].k), X, lambda: put(held[1]))


def by(thing: Any) -> float:
    """Read it in a helper."""
    return float(thing.k)


@torch.no_grad()
@pytest.mark.parametrize("thing", [ANGLE, AREA])
def test_a_change_of_a_global_that_a_helper_reads_is_refused(thing: Any) -> None:
    having(thing)
    reads = (lambda c: by(ANGLE)) if thing is ANGLE else (lambda c: by(AREA))
    refuses_after(Net(0, reads), X, lambda: put(thing))


def test_what_has_none_is_plain() -> None:
    plain = (
        1,
        1.0,
        "x",
        (1, "x"),
        torch.float32,
        Size(1, 2),
        Tagged("x"),
        np.float64(1.0),
        torch.Size((1,)),
    )
    assert all(map(attributes.lasts, plain))
    assert all(map(attributes.simple, plain))
    assert not any(attributes.lasts(having(make())) for make in MAKE.values())
    assert not any(attributes.simple((having(make()),)) for make in MAKE.values())


@torch.no_grad()
@pytest.mark.planted
@pytest.mark.parametrize("name", ["named tuple", "text"])
def test_a_guard_that_takes_them_for_plain_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "named tuple" and VERSION is None:
        pytest.skip("without versions of dicts each call compares it, with what stands on it: nothing to plant")
    monkeypatch.setattr(attributes, "may_have_fields", lambda kind: False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(name)
