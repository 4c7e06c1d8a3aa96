"""Toys of what forward reads past a module's own ways: in its dict, in what it has registered, in how tensors lie in memory."""

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.factor = nn.Linear(8, 16), nn.Linear(16, 4), 1.5

    def scale(self) -> float | Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)) * self.scale()
        found: Tensor = self.leave(h) * self.scale()
        return found


@toy("scale_from_its_dict")
class ScaleFromItsDict(_Scaled):
    """A factor is looked up in the module's `__dict__`."""

    def scale(self) -> float:
        found: float = self.__dict__["factor"]
        return found


@toy("scale_by_strides")
class ScaleByStrides(_Scaled):
    """A factor follows how the weights lie in memory, by what an op has made of them."""

    def scale(self) -> float:
        return 1.5 if (self.enter.weight * 2).is_contiguous() else 0.5


@toy("scale_of_all_buffers")
class ScaleOfAllBuffers(_Scaled):
    """A factor is the mean of all buffers, whichever there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(2))

    def scale(self) -> Tensor:
        return torch.stack([b.float().mean() for b in self.buffers()]).mean()


@toy("layout_of_an_input")
class LayoutOfAnInput(_Scaled):
    """A factor follows how the input lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)) * (1.5 if x.is_contiguous() else 0.5)
        found: Tensor = self.leave(h)
        return found


ENTRIES = tuple(toy.entries)
