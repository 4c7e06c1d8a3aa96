"""Toys of numbers that Python keeps where no attribute shows them: in buffers, behind weak references, on tensors."""

import array
import weakref

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()
KEPT = array.array("d", [2.0])


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def scale(self) -> float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)) * self.scale()
        found: Tensor = self.leave(h) * self.scale()
        return found


@toy("scale_in_a_buffer")
class ScaleInABuffer(_Scaled):
    """A factor stands in an `array.array` of the file's."""

    def scale(self) -> float:
        return KEPT[0]


@toy("scale_behind_a_reference")
class ScaleBehindAReference(_Scaled):
    """A factor stands in an object that the model knows by a weak reference alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = weakref.ref(OWNER)

    def scale(self) -> float:
        owner = self.kept()
        return 1.0 if owner is None else float(owner.factor)


class Owner:
    """Holds a factor."""

    factor = 2.0


OWNER = Owner()


@toy("scale_on_a_parameter")
class ScaleOnAParameter(_Scaled):
    """A factor is an attribute of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.leave.weight.factor = 2.0  # type: ignore[assignment]

    def scale(self) -> float:
        return float(getattr(self.leave.weight, "factor", 1.0))


ENTRIES = tuple(toy.entries)
