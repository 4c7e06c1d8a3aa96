"""Fields that no dict of the object shows, or that stand beside what forward changes: a change of one by the user is refused."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)


class Local(threading.local):
    """What each thread has for itself, with a default for all."""

    k = 1.0


class Begun(threading.local):
    """One that begins anew in each thread."""

    def __init__(self) -> None:
        self.k = 1.0


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


class Kind(enum.StrEnum):
    """A text with a name."""

    PLAIN = "plain"


class Plain:
    """An object."""

    def __init__(self) -> None:
        self.k, self.seen = 1.0, 0


class Net(nn.Module):
    """Two layers, and what stands in `held` between them."""

    def __init__(self, held: Any, reads: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last, self.held, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), held, reads

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.reads(self.held))


def having(thing: Any) -> Any:
    """The same with an attribute."""
    thing.k = 1.0
    return thing


def noting(thing: Any) -> Any:
    """Read it, and leave a note on it."""
    thing.width = 4
    return thing.k


@torch.no_grad()
@pytest.mark.parametrize(
    "make",
    [lambda: having(Local()), Local, Begun, lambda: having(Level.LOW), lambda: having(Kind.PLAIN)],
    ids=["of a thread", "default", "begun", "member that is a number", "member that is a text"],
)
def test_a_field_is_compared(make: Callable[[], Any]) -> None:
    held = make()
    refuses_after(Net(held, lambda c: c.k), X, lambda: setattr(held, "k", 3.0))


@torch.no_grad()
def test_a_default_for_all_threads_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses_after(Net(Local(), lambda c: c.k), X, lambda: monkeypatch.setattr(Local, "k", 3.0))


@torch.no_grad()
@pytest.mark.parametrize("make", [Plain, Local])
def test_what_stands_beside_a_note_of_forwards_is_compared(make: Callable[[], Any]) -> None:
    held = make()
    refuses_after(Net(held, noting), X, lambda: setattr(held, "k", 3.0))


@torch.no_grad()
@pytest.mark.variants
def test_an_entry_of_a_series_is_compared_and_its_caches_are_not() -> None:
    pandas = pytest.importorskip("pandas")
    held = pandas.Series([1.0, 2.0])
    refuses_after(Net(held, lambda s: float(s.iloc[0])), X, lambda: held.__setitem__(0, 5.0))
