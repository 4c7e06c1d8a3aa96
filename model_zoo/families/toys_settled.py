"""Toys of plain attributes that forward reads and changes, and that no result follows."""

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)


@toy("first_call_flag", "state")
class FirstCallFlag(_Layers):
    """A flag that the first call takes down, and a scale that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if self.first:
            self.scale = torch.full((16,), 0.5)
            self.first = False
        h = torch.relu(self.middle(h)) * self.scale
        found: Tensor = self.leave(h)
        return found


@toy("batch_of_the_last_call", "state")
class BatchOfTheLastCall(_Layers):
    """The batch is noted where it is another than in the last call, and sizes are made of what is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 1

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != self.rows:
            self.rows = x.shape[0]
        h = torch.tanh(self.enter(x)).view(self.rows, 2, 8)
        h = torch.relu(self.middle(h.reshape(self.rows, 16)))
        found: Tensor = self.leave(h)
        return found


@toy("hidden_of_the_last_batch", "state")
class HiddenOfTheLastBatch(_Layers):
    """A hidden state that is made anew where the batch is another than in the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 1
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if self.rows != h.size(0) or self.hidden is None:
            self.rows = h.size(0)
            self.hidden = torch.zeros(self.rows, 16)
        h = torch.relu(self.middle(h + self.hidden))
        found: Tensor = self.leave(h)
        return found


ENTRIES = tuple(toy.entries)
