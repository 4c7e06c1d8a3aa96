"""Toys about what the loss reaches, and about what trains in a way of its own."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import call, integers

toy = Toys()


class _Twice(nn.Module):
    """A layer that is used twice at the start, so that with a penalty its gradient has three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.turn = nn.Linear(8, 16), nn.Linear(16, 16)
        self.middle, self.leave = nn.Linear(16, 16), nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.turn(torch.tanh(self.turn(self.enter(x)))))
        return torch.tanh(self.middle(h))


@toy("returns_a_weight")
class ReturnsAWeight(_Twice):
    """A weight of the first half comes back beside the output, and so the loss has a part in its gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.leave(self.features(x)), self.turn.weight


@toy("energy_and_forces")
class EnergyAndForces(_Twice):
    """What a potential gives: an energy, and its gradient by the positions, taken in forward, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.leave(nn.functional.silu(self.norm(self.features(x)))).sum(1)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return (energy, -slope) if torch.is_grad_enabled() else (energy.detach(), -slope.detach())


@toy("reentrant_checkpoint")
class ReentrantCheckpoint(_Twice):
    """A part is computed again in the backward pass, by a backward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = checkpoint(self.middle, h, use_reentrant=True)
        found: Tensor = self.leave(torch.tanh(self.turn(h)))
        return found


@toy("checkpoint_that_writes", "state")
class CheckpointThatWrites(_Twice):
    """A part that is computed again in the backward pass counts in a buffer how often it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("times", torch.zeros(()))

    def part(self, h: Tensor) -> Tensor:
        self.times.add_(1)
        return torch.tanh(self.middle(h))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.part, torch.tanh(self.enter(x)), use_reentrant=True)
        found: Tensor = self.leave(torch.tanh(self.turn(h)))
        return found


@toy("checkpoint_that_keeps", "state")
class CheckpointThatKeeps(_Twice):
    """A part that is computed again in the backward pass puts a buffer in the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def part(self, h: Tensor) -> Tensor:
        self.mean = h.detach().mean(0)
        return torch.tanh(self.middle(h))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.part, torch.tanh(self.enter(x)), use_reentrant=False)
        found: Tensor = self.leave(torch.tanh(self.turn(h)))
        return found


@toy("sparse_embedding", "int-input", call(integers(0, 32, 6)))
class SparseEmbedding(nn.Module):
    """A table whose gradient is sparse, and has a row for each token, as often as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.leave = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.leave(torch.tanh(self.middle(self.embed(tokens).mean(1))))
        return found


ENTRIES = tuple(toy.entries)
