"""A write through `.data` into what autograd has saved counts no version for the model, and none for its split."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from conformance.unit.trap_kit import numbers

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda h: h.data.clamp_(max=0.5),
    "of a part": lambda h: h.data[0].fill_(0.3),
    "by index": lambda h: h.data.__setitem__((slice(None), 0), 0.2),
    "read alone": lambda h: h.data.sum(),
}


class Written(nn.Module):
    """(B, 4) to (B, 2), by a `relu` whose result, which its own backward pass reads, is written into."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.write = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2), write

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).relu()
        self.write(h)
        found: Tensor = self.c(h)
        return found


@pytest.mark.parametrize("way", WRITES)
def test_gradients_are_the_models_after_a_write_by_data(way: str) -> None:
    torch.manual_seed(0)
    model, x = Written(WRITES[way]), numbers(4, 4).float()
    whole = copy.deepcopy(model)
    whole(x).sum().backward()
    runtime = prepare_split(model, (x,), split="after:a")
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.sum())
    runtime.backward_prefix(boundary, gradients)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
