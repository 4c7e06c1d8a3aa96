"""A cache that is handed in, which forward fills and reads, is no state of the model: its own Python is split all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ariadne import prepare_split
from ariadne.stopped import PythonSplit
from conformance.unit.trap_kit import numbers, same


class Layer:
    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None

    def add(self, h: torch.Tensor) -> torch.Tensor:
        """All that came so far: (B, T, 4)."""
        self.seen = h if self.seen is None else torch.cat([self.seen, h], 1)
        return self.seen


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def layer(self, i: int) -> Layer:
        """The layer of this number, made when it is asked for first."""
        while len(self.layers) <= i:
            self.layers.append(Layer())
        return self.layers[i]


class Attends(nn.Module):
    """(B, T, 4) -> (B, 4), over all that came before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        h = self.a(x)
        h = h + cache.layer(0).add(h).mean(1, keepdim=True)
        h = self.b(h.tanh())
        return cache.layer(1).add(h).sum(1)


def test_steps_with_a_cache_are_those_of_the_model() -> None:
    model, given = Attends(), Cache()
    split = prepare_split(model, (numbers(2, 3, 4), given), split="after:a", fallback="python")
    assert isinstance(split, PythonSplit)
    assert given.layers == []
    mine, theirs = Cache(), Cache()
    for step, length in enumerate((3, 1, 2)):
        x = numbers(2, length, 4, seed=step)
        same(model(x, theirs), split.run_suffix(split.run_prefix(x, mine)))
        for one, other in zip(mine.layers, theirs.layers, strict=True):
            assert one.seen is not None
            assert other.seen is not None
            assert torch.equal(one.seen, other.seen)


def test_a_cache_that_holds_something_already_is_left_as_found() -> None:
    model, given = Attends(), Cache()
    with torch.no_grad():
        model(numbers(2, 3, 4), given)
    before = [layer.seen for layer in given.layers]
    prepare_split(model, (numbers(2, 1, 4), given), split="after:a", fallback="python")
    assert all(layer.seen is was for layer, was in zip(given.layers, before, strict=True))
