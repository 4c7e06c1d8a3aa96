"""What forward keeps since an earlier call, and somebody else writes: the model goes on with that, and so does a split of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import ModuleError


class Keeps(nn.Module):
    """Makes a table at its first call, in itself or in a part, and goes on with it."""

    def __init__(self, in_part: bool = False) -> None:
        super().__init__()
        self.enter, self.leave, self.part = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        self.in_part = in_part
        self.table: torch.Tensor | None = None
        self.weighed: torch.Tensor | None = None
        self.part.table = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keeper: Any = self.part if self.in_part else self
        if keeper.table is None:
            keeper.table = torch.arange(float(x.shape[1])) * 2
            self.weighed = self.leave.weight.detach() * 2
        h: torch.Tensor = self.leave(self.enter(x) + keeper.table)
        return h @ self.weighed


def _multiplied(keeper: Any) -> None:
    keeper.table.mul_(3)


def _assigned(keeper: Any) -> None:
    keeper.table = keeper.table * 3


EDITS: dict[str, Callable[[Any], None]] = {"in place": _multiplied, "assigned": _assigned}


def _split(model: nn.Module, x: torch.Tensor, on_change: str = "capture") -> Any:
    spec = SplitSpec("percent:50", dynamic_batch=(1, 8))
    return prepare_split(model, (x,), split=spec, fallback="refuse", on_change=on_change)


def _same(runtime: Any, whole: nn.Module, batch: int) -> bool:
    x = torch.randn(batch, 4)
    return torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))


@pytest.mark.parametrize("in_part", [False, True], ids=["itself", "a part"])
@pytest.mark.parametrize("edit", EDITS)
def test_the_split_goes_on_with_what_was_written_there(edit: str, in_part: bool) -> None:
    torch.manual_seed(0)
    model = Keeps(in_part=in_part)
    model(torch.randn(3, 4))
    whole = copy.deepcopy(model)
    runtime = _split(model, torch.randn(3, 4))
    assert _same(runtime, whole, 3)
    for one in (model, whole):
        EDITS[edit](one.part if in_part else one)
    assert _same(runtime, whole, 3)
    assert _same(runtime, whole, 2)


@pytest.mark.parametrize("edit", EDITS)
def test_or_it_is_refused_by_name(edit: str) -> None:
    model = Keeps()
    model(torch.randn(3, 4))
    runtime = _split(model, torch.randn(3, 4), "refuse")
    EDITS[edit](model)
    with pytest.raises(
        ModuleError, match="an earlier call of the model put table there, and something else stands there since"
    ):
        runtime.run_prefix(torch.randn(3, 4))


def test_what_forward_itself_makes_anew_is_no_change() -> None:
    torch.manual_seed(0)
    model = Keeps()
    model(torch.randn(3, 4))
    whole = copy.deepcopy(model)
    runtime = _split(model, torch.randn(3, 4), "refuse")
    plans = len(runtime.plans)
    for batch in (3, 2, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(model(x), whole(x))  # the model itself is called, too
        assert _same(runtime, whole, batch)
    model.table = whole.table = None
    assert _same(runtime, whole, 4)
    assert len(runtime.plans) == plans


def test_a_copy_is_held_against_its_own_table() -> None:
    model = Keeps()
    model(torch.randn(3, 4))
    runtime = _split(model, torch.randn(3, 4), "refuse")
    copied = copy.deepcopy(runtime)
    x = torch.randn(3, 4)
    expected = model(x)
    _multiplied(model)
    assert torch.equal(copied.run_suffix(copied.run_prefix(x)), expected)
    with pytest.raises(ModuleError, match="put table there"):
        runtime.run_prefix(x)


class Together(nn.Module):
    """Makes two things where the first of them is missing, the second by the code of a function that no later call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.part = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        self.table: torch.Tensor | None = None
        self.part.table = None  # type: ignore[assignment]

    def first(self) -> None:
        self.table = torch.arange(4.0)
        self.part.table = torch.arange(4.0) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.enter(x)
        if self.table is None:
            self.first()
        y: torch.Tensor = self.leave(h + self.table) * self.part.table
        return y


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_made_beside_it_counts_too(edit: str) -> None:
    torch.manual_seed(0)
    model = Together()
    model(torch.randn(3, 4))
    whole = copy.deepcopy(model)
    runtime = _split(model, torch.randn(3, 4))
    assert _same(runtime, whole, 3)
    for one in (model, whole):
        EDITS[edit](one.part)
    assert _same(runtime, whole, 3)
