"""A split to go wrong with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split

X = torch.arange(20.0).reshape(4, 5)


class Net(nn.Module):
    """Four layers, an activation called twice between them, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer4 = nn.Linear(8, 3)
        self.twice = nn.ReLU()
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.layer2(self.layer1(x)))
        return self.layer4(self.twice(self.layer3(x)))


def prepared(boundary: Any = "after:layer3", *, example: Any = (X,), train: bool = False, **given: Any) -> SplitRuntime:
    spec = {k: given.pop(k) for k in ("dynamic_batch", "trace_batch_mode", "batch_symbol") if k in given}
    return prepare_split(Net().train(train), example, split=SplitSpec(boundary, **spec), **given)


__all__ = ["Net", "X", "prepared"]
