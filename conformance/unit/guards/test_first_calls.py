"""What decides at the first call and is kept: another plan, a function's cache, a call of the model itself before the split's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import SplitSpec
from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Net(nn.Module):
    """Two layers, and a factor that forward asks for once."""

    def __init__(self, asks: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), asks
        self.kept: Any = None
        self.table: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * self.asks(self)


def split_of(asks: Callable[[Any], Any], trains: bool = False) -> Any:
    return prepare_split(Net(asks), (X,), split=SplitSpec("after:first", dynamic_batch=(1, 4), trainable=trains))


def call(split: Any, x: Tensor = X) -> Tensor:
    return split.run_suffix(split.run_prefix(x))


def trainable(m: Any) -> Any:
    if m.kept is None:
        m.kept = sum(p.requires_grad for p in m.parameters())
    return m.kept


def those_trainable(m: Any) -> Any:
    if "names" not in m.table:
        m.table["names"] = [name for name, p in m.named_parameters() if p.requires_grad]
    return len(m.table["names"])


def trainable_if_absent(m: Any) -> Any:
    if not hasattr(m, "made"):
        m.made = sum(p.requires_grad for p in m.parameters())
    return m.made


def trainable_or_error(m: Any) -> Any:
    try:
        return m.made
    except AttributeError:
        return trainable_if_absent(m)


@pytest.mark.parametrize("asks", [trainable, those_trainable, trainable_if_absent, trainable_or_error])
def test_a_count_of_what_trains_that_was_kept_is_that_of_the_first_call(asks: Callable[[Any], Any]) -> None:
    split = split_of(asks)
    call(split)
    split.model.first.weight.requires_grad_(False)
    with pytest.raises(ModuleError, match=r"at its first call, and keeps it: by .*4.*, where .* would have left .*3"):
        call(split)
    split = split_of(asks)
    split.model.first.weight.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(split.model(X), call(split)), "frozen before a first call it is as if it had always been"
    assert torch.equal(call(split), call(split))


def test_a_grad_mode_that_was_kept_is_that_of_the_first_call() -> None:
    def asks(m: Any) -> Any:
        if m.kept is None:
            m.kept = torch.is_grad_enabled()
        return 2 if m.kept else 1

    split = split_of(asks, trains=True)
    with torch.no_grad():
        assert torch.equal(call(split), split.model(X))
    with pytest.raises(ModuleError, match=r"by False, where .* would have left True"):
        split.run_training_prefix(X)
    split.model.kept = None
    split = prepare_split(split.model, (X,), split=SplitSpec("after:first", trainable=True))
    split.model(X)  # a first call of the model's own
    with torch.no_grad(), pytest.raises(ModuleError, match=r"by True, where .* would have left False"):
        call(split)


def test_what_differs_from_batch_to_batch_is_let_be() -> None:
    def asks(m: Any) -> Any:
        if m.kept is None:
            m.kept = len(m.table)
        return 2.0

    split = split_of(asks)
    with torch.no_grad():
        for x in (X, X[:1], torch.cat((X, X))):
            assert torch.equal(call(split, x), split.model(x))


class Remembers(Net):
    """It asks a function, or a method, that keeps its results."""

    @functools.lru_cache(maxsize=4)  # noqa: B019  # as people write it
    def total(self) -> Tensor:
        return self.last.weight.detach().sum()


@functools.cache
def total(layer: Any) -> Tensor:
    return layer.weight.detach().sum()


@functools.cache
def largest(layer: Any) -> float:
    return float(layer.weight.detach().max())


ASKS: dict[str, Callable[[Any], Any]] = {
    "method": lambda m: m.total(), "function": lambda m: total(m.last), "number": lambda m: largest(m.last),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ASKS)
def test_what_a_function_remembers_of_a_weight_that_changed_since_is_refused(name: str) -> None:
    split = prepare_split(Remembers(ASKS[name]), (X,), split="after:first")
    call(split)
    split.model.last.weight.mul_(2)
    with pytest.raises(ModuleError, match=r"remembers of 'last.weight' at its first call"):
        call(split)


def in_attribute(m: Any) -> Any:
    if m.kept is None:
        m.kept = m.last.weight.detach().sum()
    return m.kept


def in_dict(m: Any) -> Any:
    if "w" not in m.table:
        m.table["w"] = m.last.weight.detach().clone()
    return m.table["w"].sum()


def absent(m: Any) -> Any:
    if not hasattr(m, "made"):
        m.made = m.last.weight.detach().clone()
    return m.made.sum()


@torch.no_grad()
@pytest.mark.parametrize("asks", [in_attribute, in_dict, absent])
def test_a_weight_that_changed_after_a_call_of_the_model_itself_is_refused(asks: Callable[[Any], Any]) -> None:
    split = split_of(asks)
    whole = split.model(X)
    assert torch.equal(call(split), whole)
    split = split_of(asks)
    split.model(X)
    split.model.last.weight.mul_(2)
    with pytest.raises(ModuleError, match=r"of 'last.weight' at its first call"):
        call(split)
    split = prepare_split(split.model, (X,), split="after:first")
    assert torch.equal(call(split), split.model(X))


def looked_up_in_vars(m: Any) -> Any:
    if "made" not in vars(m):
        m.made = m.first.weight.detach().sum()
    return m.made


def looked_up_in_the_dict(m: Any) -> Any:
    if m.__dict__.get("made") is None:
        m.made = m.first.weight.detach().sum()
    return m.made


def looked_up_in_all_names(m: Any) -> Any:
    if "made" not in dir(m):
        m.made = m.first.weight.detach().sum()
    return m.made


@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called before"])
@pytest.mark.parametrize("asks", [looked_up_in_vars, looked_up_in_the_dict, looked_up_in_all_names])
def test_what_forward_looks_up_in_a_table_before_it_makes_it_is_kept(asks: Callable[[Any], Any], called: bool) -> None:
    model = Net(asks)
    if called:
        model(X)
    split = prepare_split(model, (X,), split="after:first")
    assert torch.equal(call(split), model(X))
    with torch.no_grad():
        model.first.weight.mul_(2)
    with pytest.raises(
        ModuleError, match=r"makes the attribute 'made' of the model of 'first.weight' at its first call"
    ):
        call(split)


def test_a_grid_that_a_flag_makes_anew_is_told_in_plain_words() -> None:
    """YOLOv5's `Detect`: `dynamic` is set after a first call."""

    class Detect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.grid, self.dynamic = [torch.empty(0)], False

        def forward(self, x: Tensor) -> Tensor:
            x = self.last(self.first(x))
            if self.dynamic or self.grid[0].shape[-1:] != x.shape[-1:]:
                self.grid[0] = torch.arange(x.shape[-1]).float()
            return x + self.grid[0]

    model = Detect().eval()
    split = ariadne.prepare_split(model, (X,), split="after:first")
    with torch.no_grad():
        split.run_prefix(X)
        model.dynamic = True
        with pytest.raises(
            ModuleError, match=r"keeps it: by \{0: a Tensor of float32\[3\]\}, where .* nothing that the next"
        ):
            split.run_prefix(X)
        found = model(X)  # which the message advises
        assert torch.equal(split.run_suffix(split.run_prefix(X)), found)
