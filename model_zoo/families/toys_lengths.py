"""Toys about sizes that follow data: sequences of several lengths, packed; and what is kept of each sample."""

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import call, floats

toy = Toys()


def _lengths(batch: int, generator: Generator) -> Tensor:
    return torch.randint(1, 6, (batch,), generator=generator)


def _falling(batch: int, generator: Generator) -> Tensor:
    return _lengths(batch, generator).sort(descending=True)[0]


@toy("packed_mean", "data-dependent int-input rows-mixed compiled-in-part", call(floats(6, 8), _lengths))
class PackedMean(nn.Module):
    """A packed sequence, padded again as far as the longest of these samples goes, and the mean over that."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gru, self.leave = nn.Linear(8, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.enter(x), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        found: Tensor = self.leave(padded.mean(1))
        return found


@toy("packed_in_order", "data-dependent int-input compiled-in-part", call(floats(6, 8), _falling))
class PackedInOrder(nn.Module):
    """Lengths that fall, so nothing is sorted; time goes first, in both directions; the last states are returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(16, 4)
        self.lstm = nn.LSTM(8, 8, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.enter(x).transpose(0, 1), lengths)
        states, (hidden, _) = self.lstm(packed)
        padded, lengths = pad_packed_sequence(states)
        return self.leave(padded.sum(0) / lengths[:, None]), hidden[-1]


@toy("packed_data", "data-dependent int-input rows-mixed", call(floats(6, 8), _lengths))
class PackedData(nn.Module):
    """The states of a packed sequence in one row, as many as there are steps of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.rnn, self.leave = nn.Linear(8, 8), nn.RNN(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.enter(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, hidden = self.rnn(packed)
        found: Tensor = self.leave(states.data.sum(0) / packed.data.shape[0] + hidden[-1])
        return found


@toy("branch_on_count", "data-dependent rows-mixed")
class BranchOnCount(nn.Module):
    """Python branches on a size that follows data, of an op that has no tag for it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        kept = torch.repeat_interleave((x > 0).sum(1))
        found: Tensor = self.leave(h.tanh() if kept.shape[0] % 2 else h.relu())
        return found


ENTRIES = tuple(toy.entries)
