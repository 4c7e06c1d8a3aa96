"""Toys that write: in place, through views, into inputs and buffers."""

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import dense

toy = Toys()


@toy("inplace_relu", "inplace")
def _inplace_relu() -> nn.Module:
    """`ReLU(inplace=True)` right after a layer: a cut between them makes the written tensor a leaf."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)
    )


@toy("inplace_residual", "inplace")
class InplaceResidual(nn.Module):
    """`x += f(x)`, where f's first layer keeps the x of before for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.branch = nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True))
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x += self.branch(x.clone())
        x *= 2
        found: Tensor = self.leave(x)
        return found


@toy("view_and_base_written", "inplace views")
class ViewAndBaseWritten(nn.Module):
    """A view is written, then its base is; both are read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.narrow = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        base = self.enter(x)
        view = base[:, 2:6]
        view.mul_(1.5)
        base.add_(0.5)
        found: Tensor = self.leave(base) + self.narrow(view)
        return found


@toy("stale_view", "inplace views")
class StaleView(nn.Module):
    """A view of what is then written into is used after that, and so is its base: autograd takes up the view where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base = self.enter(x)
        view = base.unsqueeze(1).expand(-1, 3, -1)
        base.relu_()
        return self.leave(base), view * 0.5, base * 0.25


@toy("view_crosses", "views", dense(4, 6))
class ViewCrosses(nn.Module):
    """Views of one base, transposed, expanded and viewed again, with nothing written: any of them may cross."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        base = self.enter(x)
        turned = base.transpose(1, 2)
        wide = base[:, :1].expand(-1, 6, -1)[..., :4]
        found: Tensor = self.leave(turned + wide).flatten(1)
        return found


@toy("slice_assigned", "inplace views", dense(6, 4))
class SliceAssigned(nn.Module):
    """A fresh tensor is filled slice by slice, as a cache of keys is."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.leave = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        cache = x.new_zeros(x.shape[0], 3, 4)
        for index, step in enumerate(self.steps):
            cache[:, index] = torch.tanh(step(x[:, index] + x[:, -1]))
        found: Tensor = self.leave(cache)
        return found


@toy("index_put", "inplace")
class IndexPut(nn.Module):
    """`index_put_` with positions that repeat, and `masked_fill_` by a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("places", torch.tensor([1, 3, 3, 15]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        gathered = h.clone()
        gathered.index_add_(1, self.places, h[:, :4])
        gathered.masked_fill_(h > 1.5, 1.5)
        found: Tensor = self.leave(gathered)
        return found


@toy("input_written", "inplace writes-input")
class InputWritten(nn.Module):
    """Forward writes into its input: the caller's own tensor changes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(-1, 1)
        found: Tensor = self.leave(torch.tanh(self.enter(x)))
        return found


@toy("aliased_outputs", "views")
class AliasedOutputs(nn.Module):
    """Outputs that share storage: a tensor, a view of it, the same tensor again, and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = self.leave(torch.tanh(self.enter(x)))
        return found, found[:, :2], found, x


@toy("buffer_written", "state")
class BufferWritten(nn.Module):
    """A running mean of its own, moved in training mode and read in both."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.linspace(-0.5, 0.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        if self.training:
            self.mean.lerp_(h.detach().mean(0), 0.1)
        found: Tensor = self.leave(torch.tanh(h - self.mean))
        return found


@toy("buffers_rotated", "state rows-mixed")
class BuffersRotated(nn.Module):
    """Three buffers that hand on to each other: each gets what the next held before this call."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        for i, name in enumerate(("now", "last", "before")):
            self.register_buffer(name, torch.full((16,), 0.5 + i))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) + self.now
        self.before, self.last, self.now = self.last, self.now, h.detach().mean(0)
        found: Tensor = self.leave(torch.tanh(h)) * self.before.mean()
        return found


@toy("buffer_replaced", "state")
class BufferReplaced(nn.Module):
    """A buffer that forward replaces by a new tensor, where `buffer_written` moves it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) * self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0)
        found: Tensor = self.leave(torch.tanh(h))
        return found


@toy("buffer_filled", "state")
class BufferFilled(nn.Module):
    """A table registered as None, which forward fills at its first call and finds at later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 16)
        h = self.enter(x) * self.table
        found: Tensor = self.leave(torch.tanh(h))
        return found


ENTRIES = tuple(toy.entries)
