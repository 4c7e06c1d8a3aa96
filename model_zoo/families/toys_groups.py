"""Toys about ops with several outputs, recurrences and layouts of memory."""

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import call, dense, floats

toy = Toys()


class _Ends(nn.Module):
    """A layer at each end of what the toy is about: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)


@toy("chunk", "views")
class Chunk(_Ends):
    """Chunks come back in another order, and one of them is never used."""

    def forward(self, x: Tensor) -> Tensor:
        a, _, c, d = self.enter(x).chunk(4, 1)
        found: Tensor = self.leave(torch.cat([d, torch.tanh(c), a, d * a], 1))
        return found


@toy("split_unbind", "views", dense(4, 8))
class SplitUnbind(_Ends):
    """Pieces of uneven sizes, and slices along a dimension, as tuples."""

    def forward(self, x: Tensor) -> Tensor:
        small, large, rest = self.enter(x).split([3, 9, 4], dim=2)
        first, second, *others = torch.cat([large, rest, small], 2).unbind(1)
        found: Tensor = self.leave(torch.stack([second, first, *others], 1))
        return found


@toy("chunk_of_batch", "views rows-mixed")
class ChunkOfBatch(_Ends):
    """The batch is split into rows, as many outputs as rows, which come back reversed."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.enter(x).split(1)
        found: Tensor = self.leave(torch.tanh(torch.cat(rows[::-1])))
        return found


@toy("topk", "int-output")
class TopK(_Ends):
    """Values and integer positions of the largest; the positions gather from elsewhere, and are returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.enter(x))
        values, positions = h.topk(4, dim=1)
        return self.leave(h) * values + h.flip(1).gather(1, positions), positions


@toy("sort_and_max", "int-output", dense(5, 8))
class SortAndMax(_Ends):
    """`max` and `sort` with their positions, and the place of a maximum as an output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.enter(x))
        largest, place = h.max(dim=1)
        ordered, order = h.sort(dim=1, descending=True)
        return {"logits": self.leave(largest + ordered[:, 1]), "place": place, "order": order[..., 0]}


@toy("lstm", "grad-mode", dense(5, 8))
class LSTM(nn.Module):
    """A two-layer bidirectional LSTM: one op with three outputs, all of which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states, (hidden, cell) = self.lstm(x)
        return self.leave(states.mean(1)), (hidden[-1] * cell[0])


@toy("lstm_cells", "", dense(5, 8))
class LSTMCells(nn.Module):
    """A loop over time with a cell called at each step: the state crosses wherever the cut is."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.leave = nn.LSTMCell(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], 16)
        for step in x.unbind(1):
            hidden, cell = self.cell(step, (hidden, cell))
        found: Tensor = self.leave(hidden)
        return found


def _lengths(batch: int, generator: Generator) -> Tensor:
    return torch.randint(1, 7, (batch,), generator=generator)


@toy("lstm_packed", "data-dependent int-input compiled-in-part", call(floats(6, 8), _lengths))
class LSTMPacked(nn.Module):
    """A packed sequence: the sizes of its steps are data."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.leave = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, hidden = self.gru(packed)
        padded, _ = pad_packed_sequence(states, batch_first=True, total_length=6)
        found: Tensor = self.leave(hidden[-1] + padded.sum(1))
        return found


@toy("broadcast_tensors", "views", dense(4, 8))
class BroadcastTensors(_Ends):
    """`meshgrid` and `broadcast_tensors`: several outputs, all views, whose schema is silent about that."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(16.0), indexing="ij")
        wide, grid = torch.broadcast_tensors(h, (rows - columns / 4).unsqueeze(0))
        found: Tensor = self.leave(wide * 2 + 0.1 * grid)
        return found


@toy("einsum_attention", "", dense(6, 8))
class EinsumAttention(_Ends):
    """Attention written with `einsum`, from one projection that is reshaped, permuted and unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        query, key, value = self.project(h).reshape(x.shape[0], 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(-1)
        mixed = torch.einsum("bhqk,bhkd->bqhd", weights, value)
        found: Tensor = self.leave(mixed.flatten(2))
        return found


@toy("causal_sdpa", "", dense(6, 8))
class CausalSDPA(_Ends):
    """`scaled_dot_product_attention` with a mask made in forward: the kernel is torch's choice."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)).unflatten(-1, (2, 8)).transpose(1, 2)
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        mixed = nn.functional.scaled_dot_product_attention(h, h, h, mask)
        found: Tensor = self.leave(mixed.transpose(1, 2).flatten(2))
        return found


def _transposed(batch: int, generator: Generator) -> Tensor:
    return floats(8, 6)(batch, generator).transpose(1, 2)


@toy("noncontiguous", "", call(_transposed))
class NonContiguous(_Ends):
    """A transposed input, outputs with strides of their own, and a reshape that has to copy."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x)
        turned = h.transpose(1, 2).reshape(x.shape[0], -1)
        return self.leave(self.enter(h)).transpose(1, 2), turned[:, ::3]


def _channels_last(batch: int, generator: Generator) -> Tensor:
    return floats(3, 6, 6)(batch, generator).to(memory_format=torch.channels_last)


@toy("channels_last", "batchnorm", call(_channels_last))
def _channels_last_net() -> nn.Module:
    """Input and weights in channels_last: strides come out as the kernels leave them."""
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return layers.to(memory_format=torch.channels_last)


@toy("layout_branch")
class LayoutBranch(_Ends):
    """Forward asks whether a tensor is contiguous, and whether its type is a floating one: in float64 too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = torch.tanh(h) if h.is_contiguous() and h.is_floating_point() else torch.sigmoid(h)
        found: Tensor = self.leave(h)
        return found


@toy("unfold_strided", "views", dense(16))
class UnfoldStrided(nn.Module):
    """Overlapping windows over one row of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        windows = torch.tanh(self.enter(x)).unfold(1, 8, 4)
        found: Tensor = self.leave(windows * 2)
        return found


@toy("complex_fft", "complex", dense(16))
class ComplexFFT(nn.Module):
    """Complex values in the middle, between a transform and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 4)
        self.filter = nn.Parameter(torch.linspace(0.5, 1.5, 9))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(torch.tanh(self.enter(x)))
        found: Tensor = self.leave(torch.fft.irfft(spectrum * self.filter, n=16))
        return found


ENTRIES = tuple(toy.entries)
