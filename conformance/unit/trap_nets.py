"""Small nets, and a split step, that several tests of traps share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ariadne import SplitRuntime
from conformance.unit.trap_twins import square_loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.third = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(self.act(self.first(x)))))


class Body(nn.Module):
    """Two layers around something, which may keep things on the model (`kept`)."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], Any], **kept: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.middle = middle
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.middle(self, self.a(x))))


class Box:
    """A plain object that a model keeps."""

    n = 0


def step(runtime: SplitRuntime, *inputs: Any, **kwargs: Any) -> None:
    """One forward and backward pass, split."""
    boundary = runtime.run_training_prefix(*inputs)
    _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss, **kwargs)
    runtime.backward_prefix(boundary, gradients)
