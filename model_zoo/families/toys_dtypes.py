"""Toys whose forward comes to know the dtype of a tensor, or keeps tensors that no `.to()` moves."""

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Ends(nn.Module):
    """A layer at each end of what the toy is about: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)


@toy("asks_element_size")
class AsksElementSize(_Ends):
    """Scales by how many bytes an element has: asked by a method, as an attribute, and by what the tensor takes."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = h * (h.element_size() / 4) + h.itemsize
        found: Tensor = self.leave(h) * (h.nbytes // h.numel())
        return found


@toy("asks_type")
class AsksType(_Ends):
    """Branches on a tensor's type: by its name, by a legacy class, by the text of a tensor without elements."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if h.type() == "torch.FloatTensor":
            h = h * 2
        found: Tensor = self.leave(h)
        return found + (1 if isinstance(found, torch.FloatTensor) else 2)


@toy("makes_like")
class MakesLike(_Ends):
    """Tensors that are made in forward from lists, of the dtype of another."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = h + h.new_tensor([index / 3 for index in range(16)])
        found: Tensor = self.leave(h) * h.new([1 / 3, 2 / 3, 1, 4 / 3])
        return found


@toy("plain_tensors")
class PlainTensors(_Ends):
    """Tensors in plain attributes and in a list, which `.to()` leaves: what is computed of them is rounded as before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.arange(16.0) / 3
        self.shifts = [torch.arange(4.0) / 7]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(torch.tanh(self.enter(x)) * self.scale.sin()) + self.shifts[0].exp()
        return found


ENTRIES = tuple(toy.entries)
