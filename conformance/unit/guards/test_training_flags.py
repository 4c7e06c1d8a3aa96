"""Training flags: a flipped one is refused wherever forward may come to depend on it, and left alone where it can't."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError
from ariadne.guards.baseline import looks_at_its_flag
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

Looks = Callable[["Looking", torch.Tensor], torch.Tensor]


class Looking(nn.Module):
    def __init__(self, forward: Looks) -> None:
        super().__init__()
        self.linear, self.drop, self.rule = nn.Linear(6, 6), nn.Dropout(), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(self, x)


def in_another_thread(module: nn.Module) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: module.training).result()


LOOKS: dict[str, Looks] = {
    "a child": lambda m, x: m.drop(m.linear(x)),
    "a copy of a child": lambda m, x: copy.copy(m.drop)(m.linear(x)),
    "a deep copy of a child": lambda m, x: copy.deepcopy(m.drop)(m.linear(x)),
    "in another thread": lambda m, x: x * (2 if in_another_thread(m) else 1),
    "its dict": lambda m, x: x * (2 if m.__dict__["training"] else 1),
    "its parts": lambda m, x: x * (2 if any(part.training for part in m.modules()) else 1),
    "its state": lambda m, x: x * (2 if m.__getstate__()["training"] else 1),
    "itself": lambda m, x: x * (2 if m.training else 1),
    "past nn.Module": lambda m, x: x * (2 if object.__getattribute__(m, "training") else 1),
    "vars": lambda m, x: x * (2 if vars(m)["training"] else 1),
    "where there is one sample": lambda m, x: x * 2 if x.shape[0] == 1 and m.training else x * 1,
    "where there are more": lambda m, x: m.drop(x) if x.shape[0] > 1 else m.linear(x),
}


def replayed(runtime: SplitRuntime, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return runtime.run_suffix(runtime.run_prefix(x))


@pytest.mark.parametrize("prepared_at", [1, 4])
@pytest.mark.parametrize("name", sorted(LOOKS))
def test_a_flag_is_held_however_forward_looks_at_it_and_at_whatever_batch(name: str, prepared_at: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Looking(LOOKS[name]), nn.Linear(6, 6)).eval()
    runtime = prepare_split(model, (numbers(prepared_at, 6),), split="after:0")
    for batch in (1, 4):
        x = numbers(batch, 6, seed=batch)
        model[1].train()
        with pytest.raises(ModuleError, match=r"'1(\.drop)?' was captured in eval mode and is now in train mode"):
            replayed(runtime, x)
        model[1].eval()
        assert torch.equal(replayed(runtime, x), model(x))


def test_a_flag_that_only_some_batches_look_at_leaves_no_plan_behind_that_was_made_under_it() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Looking(lambda m, x: x * (2 if x.shape[0] > 4 and m.training else 1))).eval()
    runtime = prepare_split(model, (numbers(3, 6),), split="after:0")
    model[1].train()
    with pytest.raises(ModuleError, match="captured in eval mode"):
        replayed(runtime, numbers(6, 6))
    model[1].eval()
    assert torch.equal(replayed(runtime, numbers(6, 6)), model(numbers(6, 6)))


class LooksBack(nn.Module):
    """The suffix looks at a module that only the prefix calls."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.one, self.two = nn.Dropout(), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(self.drop(x)))
        return x * 2 if self.drop.training else x


def test_a_flag_of_the_prefix_at_which_the_suffix_looks_is_held_by_the_suffix() -> None:
    runtime = prepare_split(LooksBack().train(), (numbers(3, 6),), split="after:one")
    boundary = runtime.run_prefix(numbers(3, 6))
    runtime.model.get_submodule("drop").eval()
    with pytest.raises(ModuleError, match="'drop' was captured in train mode"):
        runtime.run_suffix(boundary)


class Named(nn.Linear):
    """Only a name for what torch has."""

    def __init__(self) -> None:
        super().__init__(6, 6)


class Other(Named):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "looks"),
    [
        (lambda: nn.Linear(6, 6), False),
        (lambda: nn.Conv2d(1, 1, 1), False),
        (lambda: nn.Sequential(nn.Dropout()), False),
        (lambda: nn.LayerNorm(6), False),
        (Named, False),
        (Other, True),
        (nn.Dropout, True),
        (lambda: nn.BatchNorm1d(6), True),
        (lambda: nn.LSTM(6, 6), True),
        (lambda: nn.MultiheadAttention(6, 2), True),
        (lambda: nn.RReLU(), True),
        (lambda: Looking(LOOKS["vars"]), True),
    ],
)
def test_only_torch_s_own_code_that_names_no_flag_needs_none(make: Callable[[], nn.Module], looks: bool) -> None:
    assert looks_at_its_flag(make()) is looks


def test_a_forward_of_its_own_may_look_at_the_flag() -> None:
    module: Any = nn.Linear(6, 6)
    module.forward = lambda x: x * (2 if module.training else 1)
    assert looks_at_its_flag(module)
