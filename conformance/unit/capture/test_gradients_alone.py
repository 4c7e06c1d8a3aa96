"""Forwards that run with gradients alone, since they take one themselves; parts that run again; numbers that become tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Potential(nn.Module):
    """An energy, and its gradient by the positions, through what a composite op keeps to itself."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The energy of each sample, and its slope."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.last(nn.functional.silu(self.middle(self.first(x))))
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, slope


class Attends(nn.Module):
    """Attention over the two halves of each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) to (B, 8)."""
        h = x.view(-1, 1, 2, 4)
        return nn.functional.scaled_dot_product_attention(h, h, h).reshape(-1, 8)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "layer_norm": lambda: nn.LayerNorm(8),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "dropout": lambda: nn.Dropout(0.3),
    "softmax": lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)),
    "attention": Attends,
}


TWICE = {name: name != "attention" for name in MIDDLES}  # what torch has a second derivative of on a CPU


@pytest.mark.parametrize(
    ("middle", "training"), [(m, t) for m in sorted(MIDDLES) for t in (False, True)[: 1 + TWICE[m]]]
)
def test_a_gradient_through_composite_ops_splits(middle: str, training: bool) -> None:
    """The composite ops are recorded as those that they call; torch has no second derivative of its fast attention."""
    torch.manual_seed(0)
    whole = Potential(MIDDLES[middle]()).train(training)
    split = copy.deepcopy(whole)
    spec = SplitSpec("percent:60", trainable=training, dynamic_batch=(1, 8))
    runtime = prepare_split(split, (torch.randn(4, 8),), split=spec)
    for batch in (4, 3, 1):
        given = torch.randn(batch, 8)
        torch.manual_seed(batch)
        if not training:
            with torch.no_grad():
                expected, found = whole(given), runtime.run_suffix(runtime.run_prefix(given))
            assert all(map(torch.equal, expected, found))
            continue
        energy, slope = whole(given)
        loss = energy.mean() + slope.pow(2).sum()
        loss.backward()
        torch.manual_seed(batch)
        boundary = runtime.run_training_prefix(given)
        mine, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: o[0].mean() + o[1].pow(2).sum())
        runtime.backward_prefix(boundary, gradients)
        assert torch.equal(mine, loss)
        for p, q in zip(whole.parameters(), split.parameters(), strict=True):
            assert torch.equal(
                torch.zeros(()) if p.grad is None else p.grad, torch.zeros(()) if q.grad is None else q.grad
            )


def test_a_gradient_of_another_layout_has_a_plan_of_its_own() -> None:
    """The derivative of a product goes by the strides of what it takes, and autocast's types: no guard heard of that."""
    torch.manual_seed(0)
    model = Potential(nn.Linear(8, 8)).eval()
    runtime = prepare_split(model, (torch.randn(4, 8),), split="percent:60")
    with torch.no_grad(), pytest.raises(UnsupportedError, match="asks for strides"):
        runtime.run_prefix(torch.randn(8, 4).t())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="to themselves"):
        runtime.run_prefix(torch.randn(4, 8))


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


OUTSIDE = torch.zeros(4)


def _made_within(h: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return h + torch.zeros_like(h > 0, dtype=h.dtype).masked_fill_(h > 0, -1.0)


def _made_before(h: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return h + before.add_(1)


def _outside_looked_at(h: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return h + OUTSIDE[:4].sum() + OUTSIDE.add_(1)


class Checkpointed(nn.Module):
    """A part that runs again in the backward pass, and writes."""

    def __init__(self, part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.part = nn.Linear(4, 4), nn.Linear(4, 2), part

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two numbers for each sample, and what was made before the part."""
        before = torch.zeros(4)
        return self.b(checkpoint(self.part, self.a(x), before, use_reentrant=False)), before


def test_what_a_checkpointed_part_makes_it_may_write_into() -> None:
    """As attention does with its masks."""
    torch.manual_seed(0)
    whole = Checkpointed(_made_within)
    split, x = copy.deepcopy(whole), torch.randn(3, 4)
    runtime = prepare_split(split, (x,), split=SplitSpec("50%", trainable=True))
    whole(x)[0].square().mean().backward()
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda output, _: output[0].square().mean())
    runtime.backward_prefix(boundary, gradients)
    for p, q in zip(whole.parameters(), split.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("part", [_made_before, _outside_looked_at])
def test_what_it_did_not_make_it_may_not(part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """The backward pass would write again; a view of it that an op made does not make it its own."""
    with pytest.raises(UnsupportedError, match=r"did not make within\s+torch.utils.checkpoint"):
        prepare_split(Checkpointed(part), (torch.randn(3, 4),), split=SplitSpec("50%", trainable=True))
