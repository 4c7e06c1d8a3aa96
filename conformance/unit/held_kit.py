"""What tests of held objects share: a net with something between its layers, and objects that it may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split


class Config:
    """An object with an attribute of its class."""

    scale = 2.0


class Activation:
    """A callable that is no module."""

    def __init__(self) -> None:
        self.gain, self.calls = 2.0, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.gain


Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and between them what a test wants."""

    def __init__(self, middle: Forward, **held: Any) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), middle.__get__(self)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.middle(self.a(x)))


def a_default(m: Any, x: torch.Tensor) -> torch.Tensor:
    config = m.config
    return x * getattr(config, "gain", 2.0)


def through_all(m: Any, x: torch.Tensor) -> torch.Tensor:
    for module in m.aux:
        x = module(x)
    return x


def with_strays() -> Net:
    net = Net(through_all, aux=[nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5))])
    net.aux[1].eval()
    return net


def split_of(build: Callable[[], Net], training: bool) -> tuple[Net, SplitRuntime, torch.Tensor]:
    torch.manual_seed(0)
    model, x = build(), torch.randn(2, 4)
    model.train(training)
    return (
        model,
        prepare_split(
            model, example_inputs=(x,), split=SplitSpec(boundary="50%", dynamic_batch=(1, 8)), on_change="refuse"
        ),
        x,
    )


def agree(model: Net, split: SplitRuntime, x: torch.Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(split.run_suffix(split.run_prefix(x)), model(x))


__all__ = ["Activation", "Config", "Net", "a_default", "agree", "split_of", "through_all", "with_strays"]
