"""What a `functools.cached_property` makes at a first call is a table as any other that forward fills once."""

from __future__ import annotations

from functools import cached_property

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

X = numbers(2, 4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x)) * self.table
        return y


class OfNumbers(Two):
    @cached_property
    def table(self) -> torch.Tensor:
        return torch.arange(4.0)


class OfWeights(Two):
    @cached_property
    def table(self) -> torch.Tensor:
        return self.a.weight.detach().sum(0)


class OfInputs(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return super().forward(x)

    @cached_property
    def table(self) -> torch.Tensor:
        return self.seen.mean()


class Adds(Two):
    table = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table + 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [OfNumbers, OfWeights])
def test_a_model_that_has_not_run_yet_is_split(kind: type[Two]) -> None:
    model = kind()
    runtime = prepare_split(model, (X,), split="after:a")
    assert "table" not in vars(model)
    for x in (X, numbers(3, 4)):
        split = runtime.run_suffix(runtime.run_prefix(x))
        same(model(x), split)


def test_a_change_of_what_it_is_made_of_is_seen() -> None:
    model = OfWeights()
    runtime = prepare_split(model, (X,), split="after:a")
    same(model(X), runtime.run_suffix(runtime.run_prefix(X)))
    with torch.no_grad():
        model.a.weight.mul_(2)
    with pytest.raises(ModuleError, match="at its first call"):
        runtime.run_prefix(X)


@pytest.mark.parametrize(
    ("kind", "words"), [(OfInputs, "from that call's inputs"), (Adds, "reads and changes the attribute 'table'")]
)
def test_one_that_later_calls_find_otherwise_is_refused(kind: type[Two], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        prepare_split(kind(), (X,), split="after:a")
