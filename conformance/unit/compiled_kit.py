"""What the tests of the compiled mode stand on: models, splits of them, and the float64 rule."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split
from conformance.suite.oracle import beyond, in_double
from conformance.unit.trap_kit import numbers

BATCHES = (2, 1, 3, 5, 8, 17)
compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)


class Conv(nn.Module):
    """Convolutions of each kind, BatchNorm, an in-place op, a view over the batch, and a size in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1, stride=2)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(72, 10)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.norm(self.stem(x)).relu()
        x = self.pointwise(self.depthwise(x)).relu_()
        pairs = x.reshape(x.shape[0] * 2, -1)
        return {"out": self.head(self.drop(pairs.view(-1, 72))), "batch": x.shape[0]}


class Offset(nn.Module):
    """Tensors of other kinds that forward reads: a constant, a buffer, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.shift = torch.linspace(-1, 1, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale + self.shift
        return self.second(x.tanh()) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def made(build: Any, *shape: int, boundary: str = "percent:50", train: bool = False, **options: Any) -> SplitRuntime:
    torch.manual_seed(0)
    model = build().train(train)
    spec = SplitSpec(boundary, trainable=True)
    return prepare_split(model, (numbers(4, *shape),), split=spec, mode="compiled", compile_options=options)


def halves(runtime: SplitRuntime, x: torch.Tensor) -> Any:
    return runtime.run_suffix(runtime.run_prefix(x))


def whole(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def near(model: nn.Module, x: torch.Tensor, found: Any) -> None:
    """The float64 rule."""
    reference = in_double(model, whole, x, 0)
    wrong, _ = beyond(reference, whole(model, x), found)
    assert wrong is None, str(wrong)


def fails(graph: Any, example_inputs: Any) -> Any:
    """A backend that fails."""
    raise ValueError("no such instruction")
