"""Toys with a part that no plan can look into, and that `ariadne.opaque` takes as it is."""

import random

import numpy as np
import torch
from torch import Tensor, nn

import ariadne
from model_zoo.families.toys_kit import Toys

toy = Toys()

# The scoreboard asks the reference package too, whose import name is `ariadne` and which has no `opaque`: plain parts there.
opaque = getattr(ariadne, "opaque", lambda part: part)


class _Ends(nn.Module):
    """A layer at each end of what the toy is about: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)


class _Counting(nn.Module):
    """Counts its calls, and scales by the count; branches on data; has parameters and a buffer that it writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.inner, self.norm = 0, nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(x) if x.shape[0] > 1 else x
        x = x + 1 if float(x.detach().sum()) > 0 else x - 1
        return self.inner(x) / (1 + self.calls % 2)


@toy("opaque_module", "batchnorm state data-dependent rows-mixed compiled-in-part")
class OpaqueModule(_Ends):
    """A module taken as it is: a counter on `self`, a branch on data, parameters, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.part = opaque(_Counting())

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.part(self.enter(x).relu()).tanh())


@opaque
class _Noisy(nn.Module):
    """Draws from Python's, numpy's and torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
        by = scale * random.random() + float(np.random.rand())
        return {"low": x * self.weight * by, "noise": torch.rand_like(x)}


@toy("opaque_class", "draws draws-in-eval rows-mixed")
class OpaqueClass(_Ends):
    """A class of modules taken as they are, called twice: random numbers of three generators, and a dict of results."""

    def __init__(self) -> None:
        super().__init__()
        self.part = _Noisy()

    def forward(self, x: Tensor) -> Tensor:
        first = self.part(self.enter(x), scale=0.5)
        second = self.part(first["low"].tanh(), scale=2.0)
        return self.leave(second["low"] + first["noise"] * second["noise"])


@toy("opaque_method", "data-dependent")
class OpaqueMethod(_Ends):
    """A method taken as it is, in numpy by an autograd function of its own, with a list of tensors for an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((16,), 0.5))

    @opaque
    def squash(self, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        kept = torch.from_numpy(np.tanh(parts[0].detach().cpu().numpy())).to(parts[0].device, parts[0].dtype)
        return parts[0] * self.by + kept, parts[1].clamp_min(0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        low, high = self.squash([h, h * 2])
        return self.leave(low * high)


@opaque
def largest(x: Tensor, above: float) -> tuple[Tensor, int]:
    """The sum of the rows whose mean lies above a number, and how many dims a row has."""
    rows = [row for row in x if bool(row.mean() > above)]
    return (torch.stack(rows) if rows else x[:0]).sum(0, keepdim=True), x.dim() - 1


@toy("opaque_function", "data-dependent rows-mixed")
class OpaqueFunction(_Ends):
    """A function taken as it is, that branches on data and gives a number that forward computes with."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).relu()
        total, dims = largest(self.leave(h), -1.0)
        return self.leave(h) + total.div(dims)


ENTRIES = tuple(toy.entries)
