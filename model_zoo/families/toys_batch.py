"""Toys in which the batch, the data or Python decide what is computed."""

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import call, dense, floats, integers

toy = Toys()


class _Ends(nn.Module):
    """A layer at each end of what the toy is about: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)


@toy("batch_equals_constant", "", dense(30))
class BatchEqualsConstant(nn.Module):
    """Sizes of 2, 3 and 5, which are batch sizes too: they stay what they are at every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(30, 30), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)).view(-1, 2, 3, 5)
        h = h.permute(0, 2, 1, 3)[:, :3].sum(2) * 2 / (5 - 3)
        found: Tensor = self.leave(h.reshape(x.shape[0], 3 * 5))
        return found


@toy("arange_batch")
class ArangeBatch(_Ends):
    """Tensors as long as the batch, made in forward: positions, zeros and an index that picks each row's own entry."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        rows = torch.arange(x.shape[0], device=x.device)
        own = h[rows, torch.zeros(len(x), dtype=torch.long)]
        found: Tensor = self.leave(h + own.unsqueeze(1)) + torch.zeros(x.size(0), 4)
        return found


@toy("batch_in_arithmetic", "rows-mixed")
class BatchInArithmetic(_Ends):
    """The batch enters the values: an output is scaled by it, and a Python list is as long as it."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)) / x.shape[0] ** 0.5
        ramp = torch.tensor([0.5 + row for row in range(x.shape[0])])
        found: Tensor = self.leave(h) * ramp.unsqueeze(1)
        return found


@toy("batch_squared", "rows-mixed")
class BatchSquared(_Ends):
    """Every row against every other, as a contrastive model does: the output is (batch, batch), and B * B is a size."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.leave(torch.tanh(self.enter(x))))
        pairs = h @ h.T
        return pairs, pairs.reshape(-1) * 0.5


@toy("batch_halved", "rows-mixed")
class BatchHalved(_Ends):
    """Half of the batch, rounded up, is weighed otherwise than the rest."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        half = (x.shape[0] + 1) // 2
        found: Tensor = self.leave(torch.cat([h[:half] * 2, h[half:]]))
        return found


@toy("batch_flattened", "", dense(6, 8))
class BatchFlattened(nn.Module):
    """Batch and time are one dimension in the middle; the batch is then computed from what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.mix = nn.Conv1d(1, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)).flatten(0, 1).unsqueeze(1)
        h = self.mix(h).mean(1)
        found: Tensor = self.leave(h).view(-1, 6, 4)
        return found


@toy("squeezed_batch", "rows-mixed")
class SqueezedBatch(_Ends):
    """`squeeze()` without a dimension: the batch itself goes where it is 1."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)).unsqueeze(1).squeeze()
        found: Tensor = self.leave(h)
        return found


@toy("statistics_of_batch", "rows-mixed")
class StatisticsOfBatch(_Ends):
    """Rows know of each other: minus the mean over the batch, in the order of a sort over it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = torch.tanh(h - 0.5 * h.mean(0, keepdim=True))
        found: Tensor = self.leave(h.sort(dim=0).values + h)
        return found


@toy("divided_by_rest", "rows-mixed")
class DividedByRest(_Ends):
    """A factor has the batch in its denominator, which is zero at batch 8, and that is caught."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        try:
            h = h * (17 // (x.shape[0] - 8))
        except ZeroDivisionError:
            h = h * 3
        found: Tensor = self.leave(h)
        return found


@toy("branch_on_batch", "rows-mixed")
class BranchOnBatch(_Ends):
    """Another formula from five rows on, and another at exactly three."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = torch.sigmoid(h) if x.shape[0] > 4 else torch.tanh(h)
        if x.shape[0] == 3:
            h = h * 1.5
        found: Tensor = self.leave(h)
        return found


@toy("branch_on_attribute")
class BranchOnAttribute(_Ends):
    """A plain attribute, and a string in a dict, choose the formula."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = True
        self.options = {"activation": "tanh"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = torch.tanh(h) if self.options["activation"] == "tanh" else torch.relu(h)
        found: Tensor = self.leave(h * torch.sigmoid(h) if self.gated else h)
        return found


@toy("branch_on_constant", "data-dependent")
class BranchOnConstant(_Ends):
    """A branch on the value of a buffer, which no input moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0] * 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if bool((self.mask == 0).any()):
            h = h * self.mask + 0.1 * h
        found: Tensor = self.leave(h)
        return found


@toy("branch_on_data", "data-dependent rows-mixed")
class BranchOnData(_Ends):
    """A branch on the sum of the input: other data, other formula."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = torch.tanh(h) if x.sum() > 0 else torch.sigmoid(h)
        found: Tensor = self.leave(h)
        return found


@toy("item_arithmetic", "data-dependent")
class ItemArithmetic(_Ends):
    """A number read out of a parameter, and used in arithmetic on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x) * self.scale.item())
        found: Tensor = self.leave(h) * (1 + 0.1 * int(self.scale * 10))
        return found


@toy("item_of_data", "data-dependent rows-mixed")
class ItemOfData(_Ends):
    """A number read out of the activations scales what follows."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        found: Tensor = self.leave(h / h.abs().max().item())
        return found


@toy("mask_select", "data-dependent", dense(6, 8))
class MaskSelect(_Ends):
    """What is positive is picked out, as many as there are, worked on, and put back where it was."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        mask = x[..., 0] > 0
        picked = h[mask] * 2 + 0.1
        found: Tensor = self.leave(h.masked_scatter(mask.unsqueeze(-1), picked))
        return found


@toy("variable_lengths", "data-dependent int-input", call(floats(6, 8), integers(1, 7)))
class VariableLengths(_Ends):
    """Rows are padded to their own lengths, which come as a second input and are read by Python."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        means = [row[:length].mean(0) for row, length in zip(h, lengths.tolist(), strict=True)]
        found: Tensor = self.leave(torch.stack(means))
        return found


@toy("loop_over_batch")
class LoopOverBatch(_Ends):
    """Python loops over the rows: the number of ops is the batch's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        found: Tensor = self.leave(torch.stack([torch.tanh(row) for row in h]))
        return found


@toy("zero_size")
class ZeroSize(_Ends):
    """Tensors with no elements, made, concatenated, passed on and returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.enter(x))
        nothing = h[:, 16:]
        return self.leave(torch.cat([nothing, h, x.new_zeros(x.shape[0], 0)], 1)), nothing * 2


@toy("constants_from_lists")
class ConstantsFromLists(_Ends):
    """Tensors born in forward from Python lists and numbers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) + torch.tensor([0.1 * index for index in range(16)])
        h = torch.tanh(h)[:, torch.tensor([3, 1, 2, 0] * 4)]
        found: Tensor = self.leave(h) * torch.as_tensor(0.5) + torch.full((4,), 0.25)
        return found


ENTRIES = tuple(toy.entries)
