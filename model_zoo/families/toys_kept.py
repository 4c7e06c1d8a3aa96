"""Toys of what outlives a call without being a buffer, and of settings that forward asks for or sets itself."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)


@toy("noted_batch", "state")
class NotedBatch(_Layers):
    """The batch of each call is noted in a dict, an object and an attribute; nobody reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, object] = {}
        self.seen = SimpleNamespace(rows=0)
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.notes["rows"] = x.shape[0]
        h = torch.tanh(self.enter(x))
        self.rows = h.shape[0]
        h = torch.relu(self.middle(h))
        self.notes["shape"] = (h.shape[0], h.shape[1])
        if self.seen.rows != h.shape[0]:
            self.seen.rows = h.shape[0]
        found: Tensor = self.leave(h)
        return found


@toy("mask_of_the_longest", "state rows-mixed")
class MaskOfTheLongest(_Layers):
    """A table that is made anew where a batch is larger than any before, and of which each call takes a part."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if self.table is None or self.table.shape[0] < h.shape[0]:
            self.table = torch.arange(h.shape[0], dtype=h.dtype) / 8
        h = torch.relu(self.middle(h + self.table[: h.shape[0], None]))
        found: Tensor = self.leave(h)
        return found


@toy("size_by_identity", "rows-mixed")
class SizeByIdentity(_Layers):
    """A size is compared by `is`, of which no number can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.three = 3

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        rows = h.shape[0]
        if rows is self.three:
            h = h * 2
        found: Tensor = self.leave(torch.relu(self.middle(h)))
        return found


@toy("own_default_dtype")
class OwnDefaultDtype(_Layers):
    """Forward sets torch's default dtype around a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            third = torch.ones(16) / 3
            h = h + (third * torch.linspace(0, 1, 16)).float()
        finally:
            torch.set_default_dtype(before)
        found: Tensor = self.leave(torch.relu(self.middle(h)))
        return found


@toy("asks_for_the_fast_path")
class AsksForTheFastPath(_Layers):
    """Forward asks torch whether attention's fast path is on, and goes another way where it is not."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = self.middle(h) if torch.backends.mha.get_fastpath_enabled() else self.middle(h) * 2
        found: Tensor = self.leave(torch.relu(h))
        return found


ENTRIES = tuple(toy.entries)
