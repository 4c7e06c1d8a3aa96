"""Tensors outside of the model that share memory with each other, and the `.data` of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.errors import FrontierError


class Net(nn.Module):
    """A prefix and a suffix of which each calls a function."""

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.functions = nn.Linear(4, 4), nn.Linear(4, 2), [first, second]

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.functions
        return self.b(second(self.a(first(x)).relu()))


def batch(n: int) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


def split(model: nn.Module) -> Any:
    return prepare_split(model, (batch(2),), split="after:a")


def equals_whole(runtime: Any, model: nn.Module, memory: torch.Tensor, n: int) -> None:
    """One call gives what the model gives, and leaves the same in the memory that it may write into."""
    before = memory.clone()
    with torch.no_grad():
        whole, left = model(batch(n)), memory.clone()
        memory.copy_(before)
        assert torch.equal(whole, runtime.run_suffix(runtime.run_prefix(batch(n))))
    assert torch.equal(left, memory)


def test_the_elements_of_one_tensor_as_defaults_are_constants_that_are_read_as_they_are_now() -> None:
    """As the positional encoding of NeRF keeps its frequencies."""
    bands = 2.0 ** torch.linspace(0.0, 1.0, 2)
    made = [lambda x, p=p, freq=freq: p(x * freq) for p, freq in zip((torch.sin, torch.cos), bands, strict=True)]
    model = Net(*made)
    runtime = split(model)
    equals_whole(runtime, model, bands, 3)
    bands.mul_(3)
    equals_whole(runtime, model, bands, 2)


@pytest.mark.parametrize("first", [True, False])
def test_of_two_that_overlap_one_is_written(first: bool) -> None:
    memory = torch.arange(6.0)
    one, two = memory[:4], memory[2:]
    functions = [lambda x, t=one: x * t.add_(1), lambda x, t=two: x + t]
    model = Net(*(functions if first else functions[::-1]))
    runtime = split(model)
    for n in (2, 3):
        equals_whole(runtime, model, memory, n)


def test_each_file_would_have_one_of_its_own(tmp_path: Any) -> None:
    memory = torch.arange(6.0)
    one, two = memory[:4], memory[2:]
    runtime = split(Net(lambda x: x * one.add_(1), lambda x: x + two))
    with pytest.raises(FrontierError, match="written by the prefix and used by the suffix"):
        runtime.save(tmp_path / "half.safetensors", side="prefix")


def test_the_data_of_a_tensor_outside_is_that_of_the_moment() -> None:
    table = torch.ones(4)
    model = Net(lambda x: x * table.data[1:2], lambda x: x)
    runtime = split(model)
    table.data = torch.full((4,), 3.0)
    equals_whole(runtime, model, table, 3)
