"""Weights that autocast casts once for both sides of a cut: trained in one block of autocast, the split equals the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import TrainingError

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """One layer before the cut, after it, and, if asked, in the loss and where no gradient is wanted."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.quiet = nn.Linear(6, 6), nn.Linear(6, 6), quiet

    def forward(self, x: Tensor) -> Tensor:
        if self.quiet:
            with torch.no_grad():
                x = x + self.a(x)
        h = self.b(torch.relu(self.a(x)))
        return self.a(torch.tanh(self.a(h) * 3))


def bf16(cached: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def total(output: Tensor, _: Any = None) -> Tensor:
    return output.float().square().sum()


def halves(runtime: Any, x: Tensor, loss_fn: Callable[..., Tensor] = total) -> Tensor:
    with bf16():
        boundary = runtime.run_training_prefix(x)
        loss, back = runtime.train_suffix(boundary, loss_fn=loss_fn)
    runtime.backward_prefix(boundary, back)
    loss_value: Tensor = loss
    return loss_value


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("penalty", [False, True])
def test_one_block_of_autocast_gives_the_gradients_of_the_whole(quiet: bool, penalty: bool) -> None:
    whole = Twice(quiet)
    split = copy.deepcopy(whole)
    runtime = prepare_split(split, (X,), split=SplitSpec("after:b", trainable=True))

    def loss_fn(model: Any) -> Callable[..., Tensor]:
        def loss(output: Tensor, _: Any = None) -> Tensor:
            more = model.b(X).float().square().sum() if penalty else torch.zeros(())  # a layer of the prefix alone
            return total(output) + more

        return loss

    for model in (whole, split):
        model.a.weight.register_hook(lambda g: g * 2)
    for step in range(3):
        with bf16():
            loss = loss_fn(whole)(whole(X + step))
        loss.backward()
        assert torch.equal(loss.detach(), halves(runtime, X + step, loss_fn(split)))
        assert difference(gradients(whole), gradients(split)) is None
        for model in (whole, split):
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-4 * (p.grad if p.grad is not None else 0)


def test_two_boundaries_in_flight_in_one_block_share_the_casts() -> None:
    whole = Twice()
    split = copy.deepcopy(whole)
    runtime = prepare_split(split, (X,), split=SplitSpec("after:b", trainable=True))
    with bf16():
        losses = [total(whole(X + i)) for i in range(2)]
    for loss in losses:
        loss.backward()
    with bf16():
        boundaries = [runtime.run_training_prefix(X + i) for i in range(2)]
        back = [runtime.train_suffix(b, loss_fn=total)[1] for b in boundaries]
    for boundary, given in zip(boundaries, back, strict=True):
        runtime.backward_prefix(boundary, given)
    assert difference(gradients(whole), gradients(split)) is None


def refused(run: Callable[[Any], Any]) -> None:
    model = Twice()
    runtime = prepare_split(model, (X,), split=SplitSpec("after:b", trainable=True))
    with pytest.raises(TrainingError, match=r"casts the parameter .* cache_enabled=False"):
        run(runtime)
    assert all(p.grad is None for p in model.parameters())


def test_casts_of_another_block_are_refused() -> None:
    def two_blocks(runtime: Any) -> None:
        with bf16():
            boundary = runtime.run_training_prefix(X)
        with bf16():
            runtime.train_suffix(boundary, loss_fn=total)

    def cleared(runtime: Any) -> None:
        with bf16():
            boundary = runtime.run_training_prefix(X)
            torch.clear_autocast_cache()
            runtime.train_suffix(boundary, loss_fn=total)

    def from_bytes(runtime: Any) -> None:
        with bf16():
            boundary = BoundaryPayload.from_bytes(runtime.run_training_prefix(X).to_bytes())
            runtime.train_suffix(boundary, loss_fn=total)

    for run in (two_blocks, cleared, from_bytes):
        refused(run)
