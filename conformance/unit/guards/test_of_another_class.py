"""Objects that forward reads, and that are told to be of another class later: `thing.__class__ = Other`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from ariadne.guards import calls, opened, watched
from ariadne.guards.opened import State
from ariadne.guards.versions import VERSION
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)


class One:
    """Something with a method."""

    def by(self) -> float:
        """What forward multiplies by."""
        return 1.0


class Other(One):
    """Another one."""

    def by(self) -> float:
        """Something else."""
        return 3.0


class Slotted:
    """The same with slots."""

    __slots__ = ("kept",)

    def by(self) -> float:
        """What forward multiplies by."""
        return 1.0


class SlottedToo(Slotted):
    """Another one."""

    __slots__ = ()

    def by(self) -> float:
        """Something else."""
        return 3.0


class Row(list[float]):
    """A list with a method."""

    def by(self) -> float:
        """What forward multiplies by."""
        return 1.0


class RowToo(Row):
    """Another one."""

    def by(self) -> float:
        """Something else."""
        return 3.0


class Net(nn.Module):
    """Two layers, and what stands in `held` between them."""

    def __init__(self, held: Any, reads: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last, self.held, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), held, reads

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.reads(self.held))


GLOBAL = One()
Case = tuple[Any, Callable[[Any], Any], Callable[[Any], Any], type]
# What the model holds, what forward computes with it, the thing in that, and the class that it comes to be of.
CASES: dict[str, Case] = {
    "isinstance": (One, lambda c: 3.0 if isinstance(c, Other) else 1.0, lambda c: c, Other),
    "type": (One, lambda c: 3.0 if type(c) is Other else 1.0, lambda c: c, Other),
    "method": (One, lambda c: c.by(), lambda c: c, Other),
    "in a list": (lambda: [One()], lambda c: c[0].by(), lambda c: c[0], Other),
    "slots": (Slotted, lambda c: c.by(), lambda c: c, SlottedToo),
    "a list": (lambda: Row([1.0]), lambda c: c.by(), lambda c: c, RowToo),
    "bound": (lambda: One().by, lambda c: c.__self__.by(), lambda c: c.__self__, Other),
    "global": (lambda: 0, lambda c: GLOBAL.by(), lambda c: GLOBAL, Other),
}


def become(thing: Any, cls: type) -> None:
    """Make a thing one of another class."""
    thing.__class__ = cls


def refused(name: str) -> None:
    """See a split go on with what is as it was, and refuse what changed."""
    make, reads, thing, cls = CASES[name]
    held = make()
    try:
        refuses_after(Net(held, reads), X, lambda: become(thing(held), cls))
    finally:
        become(GLOBAL, One)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_a_thing_of_another_class_is_refused(name: str) -> None:
    refused(name)


@torch.no_grad()
def test_it_is_refused_by_a_copy_by_its_name_and_taken_back() -> None:
    make, reads, _, cls = CASES["method"]
    split = prepare_split(Net(make(), reads), (X,), split="after:first")
    again = copy.deepcopy(split)
    for _ in range(40):  # until all is asked in one walk
        again.run_suffix(again.run_prefix(X))
    held: Any = again.model.held  # type: ignore[union-attr]
    become(held, cls)
    with pytest.raises(ModuleError, match="'held' of the model was a One when forward read it, now it is a Other"):
        again.run_prefix(X)
    assert torch.equal(split.run_suffix(split.run_prefix(X)), split.model(X))  # type: ignore[operator]
    become(held, One)
    assert torch.equal(again.run_suffix(again.run_prefix(X)), split.model(X))  # type: ignore[operator]


def test_a_state_sees_the_class_though_no_dict_was_written() -> None:
    outer = One()
    outer.inner = One()  # type: ignore[attr-defined]
    state = State(outer)
    become(outer.inner, Other)  # type: ignore[attr-defined]
    assert not state.is_same()
    assert not state.is_same(), "at the second look, too"
    become(outer.inner, One)  # type: ignore[attr-defined]
    assert state.is_same()


@torch.no_grad()
@pytest.mark.planted
@pytest.mark.parametrize("name", ["isinstance", "slots", "global"])
def test_a_guard_that_asks_no_class_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "same_kinds", lambda kinds: [])
    monkeypatch.setattr(opened.Watched, "keeps_kinds", lambda self, kinds: True)
    monkeypatch.setattr(
        watched.Surrounded, "_keep_their_dicts", lambda self: watched.same_dicts(self._owners, self._owned)
    )
    if name == "global" and VERSION is None:
        pytest.skip(
            "without versions of dicts each call looks into it anew, which tells its class too: nothing to plant"
        )
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(name)
