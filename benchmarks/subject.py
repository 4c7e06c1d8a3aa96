"""What is measured: a model of the zoo on a device, its inputs, and its training step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import model_zoo

EXAMPLE_BATCH = 2  # what every variant captures at
LARGEST_BATCH = 256
LEARNING_RATE = 1e-5
TASKS = ("inference", "training")


class NotApplicableError(RuntimeError):
    """A competitor does not do this; the message says what."""


Step = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Subject:
    """A model of the zoo for one task on one device; `cache` is where compiled packages may be kept."""

    entry: model_zoo.Entry
    device: str
    task: str
    cache: Path | None = None
    _ready: list[nn.Module] = field(default_factory=list)
    _pristine: list[nn.Module] = field(default_factory=list)

    def model(self) -> nn.Module:
        """The model anew: equal weights each time, in the mode of the task."""
        if self._ready:
            return self._ready.pop()
        if self.device == "cpu":
            return self._built()
        if not self._pristine:  # building takes longer than a copy on the device
            self._pristine.append(self._built())
        return copy.deepcopy(self._pristine[0])

    def _built(self) -> nn.Module:
        return self.entry.build().train(self.task == "training").to(self.device)

    def build_ahead(self) -> None:
        """Build the model that the next `model()` gives, so that building it is not timed."""
        self._ready.append(self.model())

    def inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same positional and keyword inputs each time."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = moved(self.entry.inputs(batch), self.device)
        return found

    def step(self, model: Callable[..., Any], parameters: list[nn.Parameter]) -> Step:
        """What one call is: a forward, or for training a whole step; takes the forward's inputs."""
        if self.task == "inference":
            return lambda args, kwargs: model(*args, **kwargs)
        optimizer = sgd(parameters)

        def train(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = self.entry.loss(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all training steps here; a side without parameters gets one over nothing that counts."""
    return torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(()))], lr=LEARNING_RATE, momentum=0.9)


def moved(value: Any, device: str) -> Any:
    """The nested value with its tensors on the device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), value)


def kept(value: Any) -> Any:
    """The nested result with tensors of its own, which no later call writes into, as CUDA graphs do."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)


def strayed(expected: Any, found: Any) -> float:
    """The largest difference between the floating tensors of two nested results, over the largest value.

    Infinite where the results are unlike: in shapes or types, in what is not finite, or in any value of another type.
    """
    pairs = [[t for t in pytree.tree_leaves(v) if isinstance(t, torch.Tensor)] for v in (expected, found)]
    if len({tuple((t.shape, t.dtype) for t in tensors) for tensors in pairs}) > 1:
        return math.inf
    return max((_apart(a.detach(), b.detach()) for a, b in zip(*pairs, strict=True)), default=0.0)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else math.inf
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    differ = ~((a == b) | (a.isnan() & b.isnan()))  # an infinity is equal to itself
    x, y = a[differ].double(), b[differ].double()
    apart = (x - y).abs()
    if not apart.numel():
        return 0.0
    if not apart.isfinite().all():
        return math.inf
    scale = float(a[a.isfinite()].double().abs().max())
    return float(apart.max()) / (scale or 1.0)
