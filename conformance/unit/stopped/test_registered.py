"""What comes to stand in a module's registries between a prefix and its suffix, where the model's own Python runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import BoundaryError
from ariadne.stopped.laid import Tables
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Net(nn.Module):
    """It counts, on both sides, what stands in registries of which some are empty; and draws, so that no graph holds."""

    def __init__(self, lazy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.act, self.lazy = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), lazy

    def count(self) -> int:
        inner = self.act
        return len(inner._buffers) + len(inner._parameters) + len(inner._modules) + len(self._modules)

    def forward(self, x: Tensor) -> Tensor:
        if self.lazy and "made" not in self.act._buffers:
            self.act.register_buffer("made", torch.ones(1))
        before = self.count() + 0 * random.random()
        return self.last(self.first(x)) * self.count() + before


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a buffer": lambda m: m.act.register_buffer("more", torch.ones(1)),
    "a parameter": lambda m: m.act.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a module": lambda m: setattr(m.act, "more", nn.ReLU()),
    "another module": lambda m: setattr(m, "act", nn.Tanh()),
    "a module less": lambda m: delattr(m, "act"),
}


def split_of(model: nn.Module) -> Any:
    return prepare_split(model, (X,), split=SplitSpec("after:first", max_paths=1), fallback="python")


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_what_came_into_a_registry_while_a_boundary_was_in_flight_is_refused(name: str) -> None:
    split = split_of(Net())
    boundary = split.run_prefix(X)
    CHANGES[name](split.model)
    with pytest.raises(BoundaryError, match=r"changed '(more|act)' after this boundary's prefix had run"):
        split.run_suffix(boundary)


@torch.no_grad()
def test_what_forward_itself_registers_before_the_cut_is_its_own() -> None:
    split, twin = split_of(Net(lazy=True)), Net(lazy=True)
    for _ in range(2):
        assert torch.equal(split.run_suffix(split.run_prefix(X)), twin(X))


@torch.no_grad()
def test_state_that_looks_into_filled_registries_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tables, "registered", lambda self: iter(()))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_what_came_into_a_registry_while_a_boundary_was_in_flight_is_refused("a buffer")
