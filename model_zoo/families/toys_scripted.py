"""Toys that call functions under `torch.jit.script`, as many packages do for their activations."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


def _script(function: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that scripting is deprecated; packages go on using it
        return torch.jit.script(function)


@_script
def _snake(x: Tensor, p: Tensor) -> Tensor:
    return x + torch.sin(p * x).pow(2)


@_script
def _parts(x: Tensor, shift: int) -> tuple[Tensor, int, list[Tensor]]:
    low = x * 0.5
    low.clamp_(max=0.0)
    return low, x.shape[1] + shift, [x.relu(), x.tanh()]


@_script
def _by_size(x: Tensor) -> Tensor:
    if x.shape[0] > 2:
        return x * 2
    return x - 1


@_script
def _counted_(x: Tensor, seen: Tensor) -> Tensor:
    seen.add_(1)
    return x.mul_(2)


class _Ends(nn.Module):
    """A layer at each end of what the toy is about: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)


@toy("scripted_activation")
class ScriptedActivation(_Ends):
    """A scripted activation with a parameter of its own: once it is warm, the executor differentiates it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(_snake(_snake(self.enter(x), self.p), p=self.p.exp()))
        return found


@toy("scripted_attribute")
class ScriptedAttribute(_Ends):
    """A scripted function that stands in the class, with a number in and tensors, a number and a list out."""

    act = staticmethod(_parts)

    def forward(self, x: Tensor) -> Tensor:
        low, width, (high, bent) = self.act(self.enter(x), shift=2)
        found: Tensor = self.leave(low * width + high - bent)
        return found


@toy("scripted_by_size", "rows-mixed")
class ScriptedBySize(_Ends):
    """A scripted function that branches on the batch: from 3 on it does something else."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(_by_size(torch.tanh(self.enter(x))))
        return found


@toy("scripted_writes", "inplace state")
class ScriptedWrites(_Ends):
    """A scripted function that writes into its input and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)) * 1
        found: Tensor = self.leave(_counted_(h, self.seen) + h)
        return found


ENTRIES = tuple(toy.entries)
