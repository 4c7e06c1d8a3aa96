"""Inputs of classes of the user's, whose attributes stand beside what their base shows: they are part of a call."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import nn

from ariadne import prepare_split, tree
from ariadne.errors import HalfError, InputError
from ariadne.halves.atoms import told_spec
from conformance.unit.trap_kit import numbers, same

X = numbers(2, 4)


class Text(str):
    pass


class Pair(NamedTuple):
    left: Any
    right: Any


class Named(Pair):
    pass


@dataclass
class Record:
    left: Any
    right: Any = 1
    made: Any = field(init=False, default=None)

    @cached_property
    def twice(self) -> Any:
        return self.left * 2


class Scaled(nn.Module):
    def __init__(self, default: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.default = nn.Linear(4, 4), nn.Linear(4, 4), default

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        gain = given.gain if self.default is None else getattr(given, "gain", self.default)
        y: torch.Tensor = self.b(self.a(x).relu()) * gain
        return y


def with_gain(given: Any, gain: Any) -> Any:
    given.gain = gain
    return given


def makes() -> list[Any]:
    return [lambda: Text("q"), lambda: Named(1, 2), lambda: Named(X, X), lambda: Record(X), lambda: Record("q")]


NAMES = ["a text", "a namedtuple", "a namedtuple of tensors", "a dataclass of a tensor", "a dataclass"]


@pytest.mark.parametrize("make", makes(), ids=NAMES)
def test_another_number_there_is_seen(make: Any) -> None:
    model = Scaled()
    runtime = prepare_split(model, (X, with_gain(make(), 1.0)), split="after:a")
    same(model(X, with_gain(make(), 1.0)), runtime.run_suffix(runtime.run_prefix(X, with_gain(make(), 1.0))))
    other = with_gain(make(), 3.0)
    if isinstance(other, Text):
        with pytest.raises(
            InputError, match=r"attributes \{'gain': 1.0\} at capture, now it is 'q' with the attributes"
        ):
            runtime.run_prefix(X, other)
        return
    same(model(X, other), runtime.run_suffix(runtime.run_prefix(X, other)))


@pytest.mark.parametrize("make", makes(), ids=NAMES)
def test_one_where_there_was_none_is_seen(make: Any) -> None:
    model = Scaled(default=1.0)
    runtime = prepare_split(model, (X, make()), split="after:a")
    same(model(X, make()), runtime.run_suffix(runtime.run_prefix(X, make())))
    other = with_gain(make(), 3.0)
    if isinstance(other, Text):
        with pytest.raises(InputError):
            runtime.run_prefix(X, other)
        return
    same(model(X, other), runtime.run_suffix(runtime.run_prefix(X, other)))
    same(model(X, make()), runtime.run_suffix(runtime.run_prefix(X, make())))


@pytest.mark.parametrize("make", makes()[1:], ids=NAMES[1:])
def test_a_tensor_there_is_followed(make: Any) -> None:
    model = Scaled()
    runtime = prepare_split(model, (X, with_gain(make(), torch.ones(4))), split="after:a")
    given = with_gain(make(), torch.full((4,), 3.0))
    same(model(X, given), runtime.run_suffix(runtime.run_prefix(X, given)))


def test_results_keep_their_attributes() -> None:
    class Gives(Scaled):
        def forward(self, x: torch.Tensor, given: Any = None) -> Any:
            h = self.a(x)
            return with_gain(Named(self.b(h), 1), h.tanh()), with_gain(Record(h), 2.0)

    model = Gives()
    runtime = prepare_split(model, (X,), split="after:a")
    whole, split = model(X), runtime.run_suffix(runtime.run_prefix(X))
    same(whole, split)
    assert torch.equal(whole[0].gain, split[0].gain)
    assert (type(split[0]), split[1].gain) == (Named, 2.0)


def test_what_a_cached_property_has_made_is_no_part_of_a_call() -> None:
    given = Record(X)
    before = tree.flatten(given)[1]
    assert given.twice is given.__dict__["twice"]
    assert tree.flatten(given)[1] == before


def test_a_file_keeps_no_attributes_of_namedtuples() -> None:
    with pytest.raises(HalfError, match="attributes beside its fields"):
        told_spec(tree.flatten(with_gain(Named(1, 2), 1.0))[1])


def test_two_texts_with_other_attributes_are_not_identical() -> None:
    assert tree.identical(with_gain(Text("q"), 1.0), with_gain(Text("q"), 1.0))
    assert not tree.identical(with_gain(Text("q"), 1.0), with_gain(Text("q"), True))
    assert not tree.identical(Text("q"), with_gain(Text("q"), 1.0))


@dataclass
class Locked:
    """Beside its fields it has what no result can hold, made by `__post_init__`."""

    h: torch.Tensor

    def __post_init__(self) -> None:
        self.lock, self.log, self.act = threading.Lock(), logging.getLogger("a"), torch.relu


T = TypeVar("T")


@dataclass
class Typed(Generic[T]):
    """Python notes on it by which alias it was made."""

    h: T


class Gives(nn.Module):
    """It returns one of them."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.first, self.last, self.make = nn.Linear(4, 4), nn.Linear(4, 4), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.last(self.first(x)))


@pytest.mark.parametrize("make", [Locked, Typed[torch.Tensor]], ids=["locked", "typed"])
def test_what_no_result_can_hold_beside_fields_is_made_anew(make: Any) -> None:
    model, x = Gives(make), torch.ones(2, 4)
    split = prepare_split(model, (x,), split="after:first")
    with torch.no_grad():
        found = split.run_suffix(split.run_prefix(x))
        assert torch.equal(found.h, model(x).h)
    assert hasattr(found, "lock") == (make is Locked)
