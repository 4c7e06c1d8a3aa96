"""Splits of models that keep what their first call made of a weight, and the change of that weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ariadne import SplitSpec, prepare_split


def split_in_the_middle(model: nn.Module, x: torch.Tensor) -> Any:
    """A split of this model alone, with a graph or an error, for batches of 1 to 8."""
    return prepare_split(model, (x,), split=SplitSpec("percent:50", dynamic_batch=(1, 8)), fallback="refuse")


@torch.no_grad()
def double(*models: Any) -> None:
    """Twice the weight of each model's layer `leave`, in place."""
    for model in models:
        model.leave.weight.mul_(2)
