"""What forward makes of a weight at its first call, and keeps in a child, of which it asks nothing: it asks the parent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from conformance.unit.filled_kit import double, split_in_the_middle


class Keeper(nn.Module):
    """A part that is told what to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def keep(self, weight: torch.Tensor) -> None:
        self.kept = weight.detach() * 2


class Parent(nn.Module):
    """Fills its own table and, with it, an attribute of its child."""

    def __init__(self, put: Callable[[Keeper, torch.Tensor], None], each: bool = False) -> None:
        super().__init__()
        self.enter, self.leave, self.part = nn.Linear(4, 4), nn.Linear(4, 4), Keeper()
        self.put, self.each = put, each
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        if self.each:
            self.put(self.part, self.leave.weight)
        if self.table is None:
            self.table = torch.arange(4.0)
            if not self.each:
                self.put(self.part, self.leave.weight)
        kept = self.part.kept
        return nn.functional.linear(h + self.table, kept if isinstance(kept, torch.Tensor) else kept[0])


def _assigns(part: Keeper, weight: torch.Tensor) -> None:
    part.kept = weight.detach() * 2


def _assigns_a_tuple(part: Keeper, weight: torch.Tensor) -> None:
    part.kept = (weight.detach() * 2,)


def _assigns_a_list(part: Keeper, weight: torch.Tensor) -> None:
    part.kept = [weight.detach() * 2]


WAYS = {"assigned": _assigns, "a tuple": _assigns_a_tuple, "a list": _assigns_a_list, "by a method": Keeper.keep}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
def test_a_weight_that_changes_after_the_first_call_is_never_taken_for_the_old_one(way: str, ran: bool) -> None:
    torch.manual_seed(0)
    model, x = Parent(WAYS[way]), torch.randn(3, 4)
    if ran:
        model(x)
    whole = copy.deepcopy(model)
    runtime = split_in_the_middle(model, x)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
    double(model, whole)
    if ran:
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
    else:
        with pytest.raises(
            ModuleError, match=r"makes the attribute 'kept' of 'part' of 'leave\.weight' at its first call"
        ):
            runtime.run_suffix(runtime.run_prefix(x))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_changes_before_the_first_call_is_the_one_that_counts(way: str) -> None:
    torch.manual_seed(0)
    model, x = Parent(WAYS[way]), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = split_in_the_middle(model, x)
    double(model, whole)
    for batch in (3, 2, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_put_into_a_child_at_each_call_is_put_there_by_the_split(way: str) -> None:
    torch.manual_seed(0)
    model, x = Parent(WAYS[way], each=True), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = split_in_the_middle(model, x)
    for batch in (3, 2):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
        held, expected = (m.part.kept if way in ("assigned", "by a method") else m.part.kept[0] for m in (model, whole))
        assert torch.equal(held, expected)
        double(model, whole)


class Lends(nn.Module):
    """Puts a tensor that it made once into its part, at each call: the same each time, and yet put."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.part = nn.Linear(4, 4), nn.Linear(4, 4), Keeper()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        self.part.kept = self.table
        y: torch.Tensor = self.leave(self.enter(x) + self.part.kept)
        return y


def test_the_same_tensor_that_is_put_at_each_call_stands_there_after_one_of_the_split() -> None:
    torch.manual_seed(0)
    model, x = Lends(), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = split_in_the_middle(model, x)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
    assert torch.equal(model.part.kept, torch.arange(4.0))
