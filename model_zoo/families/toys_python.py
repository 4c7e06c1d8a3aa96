"""Toys that no graph holds, with cuts before, between and after what Python does: they are split as the model's own Python."""

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Three(nn.Module):
    """Three layers, after each of which forward can be stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.calls, self.kept = 0, None


@toy("python_counts", "state rows-mixed no-graph")
class PythonCounts(_Three):
    """A count on the model moves on both sides of each cut, and a tensor stands on the model while the call lasts."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        skip = self.enter(x) / (1 + self.calls % 3)
        self.kept = skip.tanh()
        h = self.middle(skip.relu())
        self.calls += 1
        h = h + self.kept * (1 + self.calls % 5)
        self.kept = None
        found: Tensor = self.leave(h) * (1 + self.calls % 2)
        return found


@toy("python_noise", "draws draws-in-eval rows-mixed no-graph")
class PythonNoise(_Three):
    """Python's, numpy's and torch's generators are drawn from on both sides of each cut, and decide the way."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) * random.uniform(0.5, 1.5) + torch.rand(16)
        if random.random() < 0.5:
            h = h * 2
        h = self.middle(F.dropout(h.tanh(), 0.25)) + torch.from_numpy(np.random.standard_normal(16)).to(h)
        found: Tensor = self.leave(F.dropout(h, 0.25)) * random.uniform(0.5, 1.5)
        return found


@toy("python_hooks", "no-graph")
class PythonHooks(_Three):
    """Hooks scale the gradients of a tensor that both sides of a cut use, and of one that is made later."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        skip = torch.tanh(self.enter(x))
        if skip.requires_grad:
            skip.register_hook(lambda gradient: gradient * 0.5)
        h = self.middle(skip) + skip
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient + gradient.tanh())
        return {"found": self.leave(h * skip), "skip": skip.sum(1)}


@toy("python_writes", "state inplace rows-mixed no-graph")
class PythonWrites(_Three):
    """A buffer is written before a cut and read after it, what crosses is written into, and a count says how often."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.enter(x).sigmoid()
        self.mean.mul_(0.5).add_(h.detach().mean(0))
        h = self.middle(h * self.calls)
        h.add_(self.mean)
        found: Tensor = self.leave(h.tanh()) / self.calls
        return found


@toy("weight_rebound", "no-graph")
class WeightRebound(_Three):
    """The norms of weights are held by `weight.data = ...`, as EEGNet does: a weight that is within its bounds stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        self.enter.weight.data = torch.renorm(self.enter.weight.data, p=2, dim=0, maxnorm=1.0)
        h = self.middle(self.enter(x).tanh())
        self.leave.weight.data = torch.renorm(self.leave.weight.data, p=2, dim=0, maxnorm=9.0)
        found: Tensor = self.leave(h.relu())
        return found


ENTRIES = tuple(toy.entries)
