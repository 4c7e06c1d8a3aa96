"""Training under autocast with a `GradScaler`: the split scales, skips and updates as the whole model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.unit.trap_twins import Twins, same, seeded, square_loss

SCALE = 2.0**10


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def grad_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


class Pair:
    """Twins with a scaler each. `step` trains both on one batch, the split with one optimizer, or with one a side."""

    def __init__(self, sides: int) -> None:
        self.twins = twins = Twins(make, seeded((2, 6)))
        own = [list(twins.runtime.prefix_parameters()), list(twins.runtime.suffix_parameters())]
        groups = [own[0] + own[1]] if sides == 1 else own
        assert all(groups)
        assert sum(map(len, groups)) == len(list(twins.split.parameters()))
        self.optimizers = [torch.optim.SGD(g, lr=0.1, momentum=0.9) for g in groups]
        self.whole_optimizer = torch.optim.SGD(twins.whole.parameters(), lr=0.1, momentum=0.9)
        self.whole_scaler, self.scaler = grad_scaler(), grad_scaler()

    def step(self, x: torch.Tensor) -> None:
        self.whole_optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = square_loss(self.twins.whole(x))
        self.whole_scaler.scale(loss).backward()
        self.whole_scaler.step(self.whole_optimizer)
        self.whole_scaler.update()

        runtime = self.twins.runtime
        one = len(self.optimizers) == 1
        if one:
            self.optimizers[0].zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            boundary = runtime.run_training_prefix(x)
            mine, gradients = runtime.train_suffix(
                boundary, loss_fn=square_loss, optimizer=None if one else self.optimizers[1], scaler=self.scaler
            )
        if one:
            runtime.backward_prefix(boundary, gradients)
            self.scaler.step(self.optimizers[0])
            self.scaler.update()
        else:
            runtime.backward_prefix(boundary, gradients, optimizer=self.optimizers[0], scaler=self.scaler)
        same(loss.detach(), mine.detach())

    def compare(self) -> None:
        same(parameters(self.twins.whole), parameters(self.twins.split))
        same([p.grad for p in self.twins.whole.parameters()], [p.grad for p in self.twins.split.parameters()])
        same(self.whole_scaler.state_dict(), self.scaler.state_dict())


@pytest.mark.parametrize("sides", [1, 2])
def test_scaled_steps_equal_the_whole_model_s(sides: int) -> None:
    pair = Pair(sides)
    before = [p.clone() for p in parameters(pair.twins.split)]
    for k in range(5):
        pair.step(seeded((2 + k % 2, 6), seed=k))
        pair.compare()
    assert pair.scaler.get_scale() == SCALE * 4  # it grew twice, for all five steps were finite
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters(pair.twins.split), strict=True))


@pytest.mark.parametrize("sides", [1, 2])
def test_a_step_that_overflows_is_skipped_and_the_scale_is_halved(sides: int) -> None:
    pair = Pair(sides)
    pair.step(seeded((2, 6)))
    before = [p.clone() for p in parameters(pair.twins.split)]
    pair.step(torch.full((2, 6), float("inf")))
    same(before, parameters(pair.twins.split))
    assert pair.scaler.get_scale() == SCALE / 2
    same(before, parameters(pair.twins.whole))
    pair.step(seeded((3, 6), seed=3))
    pair.compare()


def test_gradients_that_crossed_the_boundary_are_scaled_as_the_loss_was() -> None:
    runtime = Twins(make, seeded((2, 6))).runtime
    boundary = runtime.run_training_prefix(seeded((2, 6)))
    _, plain = runtime.train_suffix(boundary, loss_fn=square_loss)
    again = runtime.run_training_prefix(seeded((2, 6)))
    _, scaled = runtime.train_suffix(again, loss_fn=square_loss, scaler=grad_scaler())
    assert plain
    for label, gradient in plain.items():
        assert gradient is not None
        same(gradient * SCALE, scaled[label])
