"""Toys that learn of their batch without an op or a comparison: in C, by a float on its left, as text, by its type.

All of them go one way at small batches and another from batch 6 on. The last ones have other sizes that change, with the batch.
"""

import bisect
import itertools
import struct

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import Inputs

toy = Toys()
TABLE = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, *(2.0 + step for step in range(64)))


class _Weighed(nn.Module):
    """The result is weighed by what a batch is worth: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def weight(self, batch: int) -> float:
        """What a batch is worth."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        found: Tensor = self.leave(h * self.weight(x.shape[0]))
        return found


@toy("batch_in_table")
class BatchInTable(_Weighed):
    """The batch is an index into a list, as with weights that were tuned for each."""

    def weight(self, batch: int) -> float:
        return list(TABLE)[batch]


@toy("batch_in_slices")
class BatchInSlices(_Weighed):
    """The batch bounds a slice of a tuple, and an islice of it."""

    def weight(self, batch: int) -> float:
        return max(TABLE[: batch + 1]) + max(itertools.islice(TABLE, batch + 1))


@toy("batch_in_bytes")
class BatchInBytes(_Weighed):
    """The batch goes through bytes, as in what is hashed or sent."""

    def weight(self, batch: int) -> float:
        return 2.0 if struct.pack("<i", batch) > struct.pack("<i", 5) or len(bytes(batch)) > 5 else 1.0


@toy("batch_on_ramp")
class BatchOnRamp(_Weighed):
    """A float times the batch, up to a limit."""

    def weight(self, batch: int) -> float:
        return max(1.0, 0.2 * batch)


@toy("batch_in_steps")
class BatchInSteps(_Weighed):
    """A float is taken apart by the batch: where a remainder falls, and in which bin."""

    def weight(self, batch: int) -> float:
        return 2.0 if 11.5 // batch < 2 or bisect.bisect_left((0.0, 2.75), 0.5 * batch) > 1 else 1.0


@toy("batch_in_words")
class BatchInWords(_Weighed):
    """A table is looked up by the batch in words."""

    def weight(self, batch: int) -> float:
        return {"n6": 2.0, "n7": 3.0, "n8": 4.0}.get(f"n{batch}", 1.0)


@toy("shape_in_words")
class ShapeInWords(_Weighed):
    """A table is looked up by a shape in words, as kernels are by their tuners."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        tuned = {"torch.Size([7, 16])": 2.0, "torch.Size([8, 16])": 3.0}
        found: Tensor = self.leave(h * tuned.get(str(h.shape), 1.0))
        return found


@toy("batch_by_type")
class BatchByType(_Weighed):
    """The batch counts if it is an int, which it always is."""

    def weight(self, batch: int) -> float:
        return 2.0 if isinstance(batch, int) and type(batch) is int and batch > 5 else 1.0


class _Reshaped(BatchInTable):
    """The same, and what an op made has other sizes later, which it gets in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.reshaped(torch.tanh(self.enter(x)))
        found: Tensor = self.leave(h * self.weight(x.shape[0]))
        return found

    def reshaped(self, h: Tensor) -> Tensor:
        """What has changed its sizes, in the end those of `h`."""
        raise NotImplementedError


@toy("squeezed_in_place")
class SqueezedInPlace(_Reshaped):
    """A dim that a product has for the sake of it is taken out in place."""

    def reshaped(self, h: Tensor) -> Tensor:
        return torch.bmm(h[:, None], torch.diag_embed(h)).squeeze_(1)


@toy("turned_in_place")
class TurnedInPlace(_Reshaped):
    """Samples come in columns in between."""

    def reshaped(self, h: Tensor) -> Tensor:
        columns = h * 2
        columns.t_()
        columns = columns - columns.mean(0)
        columns.transpose_(0, 1)
        return columns


@toy("windowed_in_place")
class WindowedInPlace(_Reshaped):
    """Of twice as many numbers every other one stays, by strides, and a dim comes and goes."""

    def reshaped(self, h: Tensor) -> Tensor:
        twice = h.repeat_interleave(2, 1)
        twice.as_strided_((h.shape[0], 16), (32, 2))
        more = twice + 1
        more.unsqueeze_(1)
        return (more - 1).squeeze_(1)


def _images(batch: int, generator: torch.Generator) -> Inputs:
    """Of other heights and widths at each batch: 6 to 12 by 7 to 9, and at batch 8 20 by 13."""
    height, width = (20, 13) if batch == 8 else (6 + 2 * batch % 8, 9 - batch % 3)
    return (torch.randn(batch, 2, height, width, generator=generator),), {}


@toy("height_and_width", sample=_images, dynamic={"x": {2: "H", 3: "W"}})
class HeightAndWidth(nn.Module):
    """What is computed follows a height and a width, each in its own way, and images that are high take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) * (x.shape[2] - 2 * x.shape[3])
        h = torch.tanh(h) if x.shape[2] > 16 else torch.relu(h)
        found: Tensor = self.leave(h).transpose(2, 3).reshape(x.shape[0], 2 * x.shape[3], x.shape[2])
        return found


def _sequences(batch: int, generator: torch.Generator) -> Inputs:
    """Six steps of each sample, time first, and a table that all share; at batch 6 each of the sizes is the batch."""
    shared = torch.randn(6, 16, generator=generator)
    return (torch.randn(6, batch, 8, generator=generator), shared), {}


@toy("time_first", "rows-mixed", sample=_sequences, batch_dim={"x": 1, "table": None})
class TimeFirst(_Weighed):
    """The batch is dim 1: what is computed goes on along time, and counts the samples."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x) + table[:, None]).cumsum(0)
        found: Tensor = self.leave(h - h.mean(1, keepdim=True) / 2) * (3 / x.shape[1])
        return found


ENTRIES = tuple(toy.entries)
