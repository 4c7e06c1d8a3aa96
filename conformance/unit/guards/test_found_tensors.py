"""What stands where forward found a tensor that the model holds: a thing of another kind there is refused by name."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from ariadne.guards import baseline
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)
Get = Callable[[Any], Any]


class Own(nn.Parameter):
    """A class of weights of the user's own."""


class Slotted:
    """An object with a slot."""

    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


class Thing:
    """An object with a number."""

    def __init__(self, k: float) -> None:
        self.k = k


class Net(nn.Module):
    """Two layers, and what `asks` makes of something that the model holds."""

    def __init__(self, held: Any, asks: Get) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.held, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), held, asks

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.asks(self))


def twos() -> Tensor:
    return torch.full((4,), 2.0)


def held_by_name(m: Any, new: Any) -> None:
    m.held = new


def item(key: Any) -> Callable[[Any, Any], None]:
    return lambda m, new: m.held.__setitem__(key, new)


# What holds a tensor, how forward gets at it, and how another thing is put there.
PLACES: dict[str, tuple[Callable[[Any], Any], Get, Callable[[Any, Any], None]]] = {
    "attribute": (lambda t: t, lambda m: m.held, held_by_name),
    "dict": (lambda t: {"a": t}, lambda m: m.held["a"], item("a")),
    "list": (lambda t: [t], lambda m: m.held[0], item(0)),
    "deque": (lambda t: deque([t]), lambda m: m.held[0], item(0)),
    "object": (lambda t: SimpleNamespace(w=t), lambda m: m.held.w, lambda m, new: setattr(m.held, "w", new)),
    "slot": (Slotted, lambda m: m.held.w, lambda m, new: setattr(m.held, "w", new)),
    "list in a dict": (lambda t: {"a": [t]}, lambda m: m.held["a"][0], lambda m, new: m.held["a"].__setitem__(0, new)),
}
# What forward asks of it, and what another thing is put there.
KINDS: dict[str, tuple[Get, Callable[[], Any]]] = {
    "float": (lambda t: 5.0 if isinstance(t, float) else t + 1, lambda: 2.0),
    "int": (lambda t: t if torch.is_tensor(t) else 5, lambda: 2),
    "None": (lambda t: 1.0 if t is None else t * 2, lambda: None),
    "None, of which no op reads": (lambda t: 1.0 if t is None else 2.0, lambda: None),
    "array": (lambda t: torch.from_numpy(t) if isinstance(t, np.ndarray) else t + 1, lambda: np.ones(4, np.float32)),
    "Parameter": (lambda t: t * (2 if isinstance(t, nn.Parameter) else 1), lambda: nn.Parameter(twos())),
    "type": (lambda t: t * (1 if type(t) is torch.Tensor else 2), lambda: nn.Parameter(twos())),
    "a class of the user's": (lambda t: t * (2 if isinstance(t, Own) else 1), lambda: Own(twos())),
    "one that requires a gradient": (lambda t: t * (2 if t.requires_grad else 1), lambda: twos().requires_grad_()),
}


def refuses(place: str, kind: str) -> None:
    """See a split go on with another tensor of the kind, and refuse a thing of another."""
    (hold, get, put), (ask, other) = PLACES[place], KINDS[kind]
    model: Any = Net(hold(twos()), lambda m: ask(get(m)))
    refuses_after(model, X, lambda: put(model, other()))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["attribute", "dict", "list"])
def test_a_thing_of_another_kind_in_its_place_is_refused(place: str, kind: str) -> None:
    refuses(place, kind)


@torch.no_grad()
@pytest.mark.parametrize("place", ["deque", "object", "slot", "list in a dict"])
def test_it_is_refused_wherever_a_plan_reads_it(place: str) -> None:
    refuses(place, "float")


@torch.no_grad()
def test_the_error_names_the_place_and_both_kinds_and_undone_it_serves_again() -> None:
    hold, get, put = PLACES["dict"]
    split = prepare_split(Net(hold(twos()), lambda m: KINDS["None"][0](get(m))), (X,), split="after:first")
    model: Any = split.model
    for new in (torch.ones(4), nn.Parameter(torch.zeros(4))):  # any tensor, where nobody asks for its class
        put(model, new)
        assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
    boundary, again = split.run_prefix(X), copy.deepcopy(split)
    put(model, None)
    with pytest.raises(
        ModuleError, match=r"was held\['a'\] = a Tensor when forward read it, now it is held\['a'\] = None"
    ):
        split.run_suffix(boundary)
    put(model, twos())
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
    put(again.model, 2.0)
    with pytest.raises(ModuleError, match=r"now it is held\['a'\] = a float"):
        again.run_prefix(X)


@torch.no_grad()
@pytest.mark.parametrize("place", ["attribute", "list"])
def test_it_is_refused_each_time_until_it_is_undone(place: str) -> None:
    hold, get, put = PLACES[place]
    split = prepare_split(Net(hold(twos()), lambda m: KINDS["float"][0](get(m))), (X,), split="after:first")
    model: Any = split.model
    for _ in range(2):
        for _ in range(3):
            put(model, torch.ones(4))
            assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
        put(model, 2.0)
        for _ in range(3):
            with pytest.raises(ModuleError, match="a float"):
                split.run_prefix(X)


@torch.no_grad()
@pytest.mark.parametrize("place", ["attribute", "list"])
def test_whether_it_requires_a_gradient_is_seen_where_it_is_told_so(place: str) -> None:
    hold, get, _ = PLACES[place]
    model: Any = Net(hold(twos()), lambda m: KINDS["one that requires a gradient"][0](get(m)))
    refuses_after(model, X, lambda: get(model).requires_grad_())


OF_SETS: dict[str, tuple[Any, Get, Get]] = {
    "another tensor": (lambda: {twos()}, lambda s: sum(s), lambda s: (s.clear(), s.add(torch.ones(4)))),
    "one is taken out and another put in": (
        lambda: {twos()},
        lambda s: next(iter(s)),
        lambda s: (s.pop(), s.add(torch.ones(4))),
    ),
    "another object": (lambda: {Thing(2.0)}, lambda s: sum(o.k for o in s), lambda s: (s.pop(), s.add(Thing(3.0)))),
    "an object in it": (
        lambda: {Thing(2.0)},
        lambda s: sum(o.k for o in s),
        lambda s: setattr(next(iter(s)), "k", 3.0),
    ),
    "an object in a frozenset": (
        lambda: frozenset({Thing(2.0)}),
        lambda s: sum(o.k for o in s),
        lambda s: setattr(next(iter(s)), "k", 3.0),
    ),
    "an object in a frozenset in it": (
        lambda: {frozenset({Thing(2.0)})},
        lambda s: sum(o.k for inner in s for o in inner),
        lambda s: setattr(next(iter(next(iter(s)))), "k", 3.0),
    ),
}
GLOBAL: dict[str, Any] = {}


@torch.no_grad()
@pytest.mark.parametrize("case", OF_SETS)
def test_what_is_in_a_set_is_guarded(case: str) -> None:
    make, asks, change = OF_SETS[case]
    held = make()
    refuses_after(Net(held, lambda m: asks(m.held)), X, lambda: change(held))


@torch.no_grad()
@pytest.mark.parametrize("case", ["another object", "an object in it", "an object in a frozenset"])
def test_what_is_in_a_set_outside_of_the_model_is_guarded(case: str) -> None:
    make, asks, change = OF_SETS[case]
    GLOBAL["set"] = held = make()
    refuses_after(Net(0, lambda m: asks(GLOBAL["set"])), X, lambda: change(held))


@torch.no_grad()
def test_a_set_that_holds_the_same_again_serves() -> None:
    held = {twos()}
    split = prepare_split(Net(held, lambda m: sum(m.held)), (X,), split="after:first")
    members = [*held]
    held.clear()
    held.update(members)
    members[0].mul_(3)
    assert torch.equal(split.run_suffix(split.run_prefix(X)), split.model(X))  # type: ignore[operator]


@torch.no_grad()
@pytest.mark.planted
@pytest.mark.parametrize("place", ["attribute", "dict", "list"])
def test_a_guard_that_asks_no_kind_is_noticed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline.Classes, "is_same", lambda self: True)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refuses(place, "float")
