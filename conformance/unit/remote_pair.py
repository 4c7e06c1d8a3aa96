"""A split on two sides of a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ariadne


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


class Pair:
    """A model, and its halves as files."""

    def __init__(self, folder: Path, model: nn.Module, split: str = "after:2", x: Any = None) -> None:
        self.model = model
        x = torch.randn(2, 3, 8, 8) if x is None else x
        self.runtime = ariadne.prepare_split(model, (x,), split=split)
        self.prefix, self.suffix = folder / "prefix", folder / "suffix"
        self.runtime.save(self.prefix, side="prefix")
        self.runtime.save(self.suffix, side="suffix")
        self.edge = ariadne.load(self.prefix)

    def whole(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.model(x)


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8)


__all__ = ["Pair", "images", "net"]
