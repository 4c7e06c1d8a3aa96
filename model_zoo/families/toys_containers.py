"""Toys that put something into containers at each call, or fill them at the first."""

from collections import deque
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)


@toy("appended_losses", "state")
class AppendedLosses(_Layers):
    """A list of losses to which each layer appends its own, as mixtures of experts do; no call empties it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        self.losses.append(h.pow(2).mean())
        h = torch.relu(self.middle(h))
        self.losses += [h.abs().mean()]
        found: Tensor = self.leave(h)
        return found


@toy("renewed_losses", "state")
class RenewedLosses(_Layers):
    """The same, in a list that each call empties first."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        h = torch.tanh(self.enter(x))
        self.losses.append(h.pow(2).mean())
        h = torch.relu(self.middle(h))
        self.losses.append(h.abs().mean())
        found: Tensor = self.leave(h)
        return found


@toy("recorded_activations", "state")
class RecordedActivations(_Layers):
    """Activations by name in a dict, one of them in a tuple; and in a list under a key that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, object] = {}
        self.all: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        self.seen["enter"] = h
        self.all.setdefault("h", []).append(h.detach())
        h = torch.relu(self.middle(h))
        self.seen["middle"] = (h, h.mean())
        self.all.setdefault("h", []).append(h.detach())
        found: Tensor = self.leave(h)
        return found


@toy("recording_object", "state")
class RecordingObject(_Layers):
    """Activations as attributes of an object, and the last two in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SimpleNamespace(enter=None)
        self.last: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        self.seen.enter = h
        self.last.append(h.sum())
        h = torch.relu(self.middle(h))
        self.seen.middle = h
        self.last.append(h.sum())
        found: Tensor = self.leave(h)
        return found


@toy("cache_beside_record", "state")
class CacheBesideRecord(_Layers):
    """A table that the first call makes, by its width, and beside it what each call leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}
        self.table: Tensor | None = None
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 16)
        h = torch.tanh(self.enter(x)) + self.table
        if h.shape[1] not in self.tables:
            self.tables[h.shape[1]] = torch.linspace(1, 2, h.shape[1])
        h = torch.relu(self.middle(h * self.tables[h.shape[1]]))
        self.last = h
        found: Tensor = self.leave(h)
        return found


@toy("record_in_a_part", "state")
class RecordInAPart(nn.Module):
    """A part keeps what went into it, for the whole to look at after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (RecordedActivations() for _ in range(2))
        self.second.enter = nn.Linear(4, 16)
        self.sums: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.sums.append(h.sum())
        found: Tensor = self.second(h)
        return found


ENTRIES = tuple(toy.entries)
