"""Toys whose Python reads and changes what stands on their classes."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Scaled(nn.Module):
    gain: ClassVar[float] = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def scale(self, h: Tensor) -> float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = h * self.scale(h)
        found: Tensor = self.leave(h) * self.scale(h)
        return found


@toy("scale_of_the_class")
class ScaleOfTheClass(_Scaled):
    """A factor stands on the class."""

    def scale(self, h: Tensor) -> float:
        return type(self).gain


@toy("scale_behind_its_own")
class ScaleBehindItsOwn(_Scaled):
    """A factor stands on the class above, behind another of that name."""

    gain = 0.5

    def scale(self, h: Tensor) -> float:
        return super().gain


@toy("batch_on_the_class", "rows-mixed")
class BatchOnTheClass(_Scaled):
    """The batch is put on the class, and read there."""

    rows: ClassVar[int] = 0

    def scale(self, h: Tensor) -> float:
        type(self).rows = h.shape[0]
        return 1 + type(self).rows / 4


ENTRIES = tuple(toy.entries)
