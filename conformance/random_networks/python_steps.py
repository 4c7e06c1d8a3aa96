"""Steps whose Python no graph shows: what stands on a class, divisions that may be by zero, parts that run again or as they are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ariadne

MAY_WRITE = (
    "checkpointed",
    "opaque",  # a plan keeps these whole, and does not know what they leave alone
    "grown",  # in what it makes itself
    "slope",  # the flag of what it detaches, by requires_grad_
)
SCALES = (1.0, 2.0, 0.5)  # what a session lets the number of a network's class be


def appended_to_class(frame: Any, x: Tensor) -> Tensor:
    """The list stands on the class, and another may be put there."""
    type(frame.net).seen.append(x)
    return x * 1


def bound_to_class(frame: Any, x: Tensor) -> Tensor:
    """The name is bound anew at each call."""
    type(frame.net).latest = x
    return x * 1


def by_class(frame: Any, x: Tensor, asked: str) -> Tensor:
    """By a number of the class."""
    return x * (type(frame.net).scale if asked == "class" else frame.net.scale)


def timed(frame: Any, x: Tensor, clock: str) -> Tensor:
    """It is only told how long it took."""
    began = getattr(time, clock)()
    found = x * 2
    print(f"{getattr(time, clock)() - began} since")
    return found


def by_a_file(frame: Any, x: Tensor, asked: str) -> Tensor:
    """What a file holds, or whether it is there, may be otherwise at the next call."""
    here = Path(__file__)
    return x * (here.exists() + 1 if asked == "whether" else len(here.read_text()) % 7)


def divided(frame: Any, x: Tensor, at: int, how: str) -> Tensor:
    """By a number that there is not at one batch."""
    rest = frame.batch - at
    if how == "caught":
        try:
            return x * (7 // rest)
        except ZeroDivisionError:
            return x * 3
    return x * (7 // rest if how == "floor" else 7 % rest if how == "rest" else 7 / rest)


def checkpointed(frame: Any, x: Tensor, reentrant: bool) -> Tensor:
    """A part that the backward pass runs again, which writes into a buffer or puts another in its place."""

    net = frame.net  # a deep copy of a split follows a closure to the model, and not what else holds it

    def part(h: Tensor) -> Tensor:
        if reentrant:
            net.passed.add_(1)
        else:
            net.total = h.detach().float().sum()
        return torch.tanh(h) * 1.5

    found: Tensor = checkpoint(part, x, use_reentrant=reentrant)
    return found


def unchecked(frame: Any, x: Tensor, reentrant: bool) -> Tensor:
    """What it computes."""
    return torch.tanh(x) * 1.5


@ariadne.opaque
def sharpened(x: Tensor) -> Tensor:
    """Goes one way or the other by its data."""
    return x * 2 if float(x.detach().double().sum()) > 0 else x - 1


@ariadne.opaque
def doubled_(x: Tensor) -> Tensor:
    """Writes into what it is given, by what numpy makes of it."""
    return x.mul_(2 if np.isfinite(x.detach().numpy()).all() else 3)


class Counting(nn.Module):
    """Counts its calls in Python, and leaves torch for numpy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.calls, self.inner = 0, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.is_meta:  # of which there are no data
            return self.inner(x)
        gate = torch.from_numpy(np.tanh(x.detach().numpy()))
        return self.inner(x) * gate / (1 + self.calls % 2)


def counting(width: int) -> nn.Module:
    """Such a part, taken as it is."""
    return ariadne.opaque(Counting(width))
