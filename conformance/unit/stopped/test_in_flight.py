"""Boundaries of a Python split beside each other, and what their forwards put on the model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, prepare_split
from ariadne.errors import BoundaryError


class _Keeps(nn.Module):
    """What the part before the cut puts on the model is used after it."""

    def __init__(self, into_list: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: Any = [None] if into_list else None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.kept, list):
            self.kept[0] = x * 2
        else:
            self.kept = x * 2
        h: Tensor = self.last(self.first(x) * random.random())
        return h + (self.kept[0] if isinstance(self.kept, list) else self.kept)


@pytest.mark.parametrize("into_list", [False, True])
def test_what_a_prefix_put_on_the_model_must_be_there_when_its_forward_goes_on(into_list: bool) -> None:
    model = _Keeps(into_list).eval()
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:first", fallback="python")
    first, second = split.run_prefix(x), split.run_prefix(y)
    with pytest.raises(BoundaryError, match="into which the prefix had put something"):
        split.run_suffix(first)
    with torch.no_grad():
        random.seed(0)
        whole = model(y)
        random.seed(0)
        assert torch.equal(split.run_suffix(split.run_prefix(y)), whole)
    with pytest.raises(BoundaryError, match="into which the prefix had put something"):
        split.run_suffix(second)
    first, second = split.run_training_prefix(x), split.run_training_prefix(y)
    with pytest.raises(BoundaryError, match="into which the prefix had put something"):
        split.train_suffix(first, loss_fn=lambda output, _: output.sum())


def test_bytes_are_read_by_the_class_of_the_boundary_that_wrote_them() -> None:
    model, x = _Keeps(False).eval(), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:first", fallback="python")
    boundary = split.run_prefix(x)
    assert type(type(boundary).from_bytes(boundary.to_bytes())) is BoundaryPayload
