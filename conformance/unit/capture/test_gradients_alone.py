"""Forwards that run with gradients alone, since they take one themselves; and state that turns from a number into a tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError


class Critic(nn.Module):
    """It takes the gradient of its score by its input, as critics with a penalty do."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The score of each sample, and the penalty."""
        x = x.detach().requires_grad_(True)
        score = self.last(self.first(x).relu()).flatten()
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score, slope.pow(2).sum()


@pytest.mark.parametrize("cut", ["cut:3", "percent:50", "cut:9"])
def test_a_gradient_that_forward_takes_trains_split(cut: str) -> None:
    """Through convolutions, whose second derivatives are ops of torch's own; without gradients the model's own error comes."""
    torch.manual_seed(0)
    whole = Critic(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 8))
    split, x = copy.deepcopy(whole), torch.randn(4, 3, 8, 8)
    runtime = prepare_split(split, (x,), split=SplitSpec(cut, trainable=True, dynamic_batch=(1, 8)))
    for batch in (4, 3):
        given = torch.randn(batch, 3, 8, 8)
        score, penalty = whole(given)
        loss = score.mean() + penalty
        loss.backward()
        boundary = runtime.run_training_prefix(given)
        mine, gradients = runtime.train_suffix(boundary, loss_fn=lambda output, _: output[0].mean() + output[1])
        runtime.backward_prefix(boundary, gradients)
        assert torch.equal(mine, loss)
        for p, q in zip(whole.parameters(), split.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
    with pytest.raises(RuntimeError, match="does not require grad"):
        runtime.run_prefix(x)


class Spikes(nn.Module):
    """A potential that is a number until the first call, and a tensor from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.potential: float | torch.Tensor = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Half of what there was, and what comes."""
        self.potential = self.potential * 0.5 + x
        return self.potential.sigmoid()


def test_a_number_that_becomes_a_tensor_is_refused_by_name() -> None:
    """Torch's error about the truth of a tensor came out."""
    with pytest.raises(UnsupportedError, match=r"'potential' of '1' \(from 0\.0 to a tensor\)"):
        prepare_split(nn.Sequential(nn.Linear(4, 4), Spikes()), (torch.randn(2, 4),), split="after:0")
