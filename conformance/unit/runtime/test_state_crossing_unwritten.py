"""State that no op writes, of which a view or the tensor itself crosses: written between the two sides, it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import BoundaryError

OUTSIDE = torch.ones(4, 4)


class Net(nn.Module):
    """A view is taken before the cut, and used after it."""

    def __init__(self, view: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.view = nn.Linear(4, 4), nn.Linear(4, 4), view
        self.register_buffer("table", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.view(self)
        return self.last(self.first(x).relu()) + part


VIEWS: dict[str, tuple[Callable[[Any], torch.Tensor], Callable[[Any], torch.Tensor]]] = {
    "of a buffer": (lambda m: m.table[1], lambda m: m.table),
    "of a parameter": (lambda m: m.last.weight.t()[0], lambda m: m.last.weight),
    "of a global tensor": (lambda m: OUTSIDE[1], lambda m: OUTSIDE),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_state_that_crosses_must_not_be_written_before_the_suffix_ran(name: str) -> None:
    view, state = VIEWS[name]
    model, x = Net(view), torch.randn(2, 4)
    split = prepare_split(model, (x,), split=SplitSpec("after:first", trainable=True))
    before = split.run_prefix(x)
    with torch.no_grad():
        state(model).add_(1)
    for call in (lambda: split.run_suffix(before), before.to_bytes):
        with pytest.raises(BoundaryError, match="was written into after the prefix ran"):
            call()
    boundary = split.run_training_prefix(x)
    with torch.no_grad():
        state(model).add_(1)
    with pytest.raises(BoundaryError, match="was written into after the prefix ran"):
        split.train_suffix(boundary, loss_fn=lambda o, t: o.sum())
    after = split.run_suffix(split.run_prefix(x))
    with torch.no_grad():
        assert torch.equal(after, model(x))


def test_a_step_of_the_optimizer_may_come_after_the_suffix() -> None:
    model, x = Net(VIEWS["of a parameter"][0]), torch.randn(2, 4)
    split = prepare_split(model, (x,), split=SplitSpec("after:first", trainable=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        boundary = split.run_training_prefix(x)
        loss, gradients = split.train_suffix(boundary, loss_fn=lambda o, t: o.sum())
        split.backward_prefix(boundary, gradients)
        with torch.no_grad():
            assert torch.equal(loss, model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
