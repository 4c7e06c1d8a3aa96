"""Lazy Tensor, by its TorchScript backend: ops are noted down as Python runs, at each call, and run as a graph at `mark_step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._lazy import mark_step, ts_backend

from conformance.targets.base import Captured, Loss, Target

ts_backend.init()


def to(device: str, value: Any) -> Any:
    """The tensors of nested values, moved."""
    return torch.utils._pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, value)


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """As its tutorial does: model and inputs are moved to the device "lazy", and each step ends with `mark_step`."""
    model.to("lazy")

    def call(*args: Any, **kwargs: Any) -> Any:
        output = model(*to("lazy", args), **to("lazy", kwargs))
        mark_step()
        return to("cpu", output)

    def step(loss: Loss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # Its own backend fails on the harness's loss: a product with a number is of float64 there.
        loss(to("cpu", model(*to("lazy", args), **to("lazy", kwargs)))).backward()
        mark_step()

    return Captured(call, owner=model, step=step)


TARGET = Target(
    name="lazy_tensor",
    title="Lazy Tensor (TorchScript backend)",
    kind="capture",
    package="torch",
    source="https://github.com/pytorch/pytorch/blob/main/torch/csrc/lazy/tutorial.md",
    capture=capture,
    disclaims={
        "left": "documented: the model is moved to another device",
        "random": "another device: draws from the CPU's generator are not said to be the same there",
        "device": "another device: what the model does for the CPU by name is not done there",
        "dropout": "another device: draws from the CPU's generator are not said to be the same there",
    },
)
