"""A Python split of a model whose part before the cut writes state that the part after it reads, with two calls in flight."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import PythonSplit, prepare_split
from ariadne.errors import BoundaryError


class _Counts(nn.Module):
    """A buffer that is written before the cut and read after it; no graph holds, since Python's own number is drawn."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.last, self.norm, self.what = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), what
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        if random.random() > 2:
            return x
        if self.what == "norm":
            return self.last(self.first(self.norm(x))) * self.norm.running_mean
        self.count += x.detach().sum(0)
        h = self.last(self.first(x))
        if self.what == "both":
            self.count.mul_(0.5)
        return h * self.count


def _split(what: str, *, training: bool = False) -> PythonSplit:
    torch.manual_seed(0)
    model = _Counts(what).train(training)
    split = prepare_split(model, (torch.randn(2, 4),), split="after:first", fallback="python")
    assert isinstance(split, PythonSplit)
    return split


@pytest.mark.parametrize("what", ["count", "norm"])
def test_the_suffix_finds_the_state_that_its_prefix_left(what: str) -> None:
    split = _split(what, training=what == "norm")
    whole, calls = copy.deepcopy(split.model), [torch.randn(2, 4) for _ in range(3)]
    with torch.no_grad():
        expected = [whole(x) for x in calls]
    boundaries = [split.run_prefix(x) for x in calls]
    assert all(torch.equal(split.run_suffix(b), e) for b, e in zip(boundaries, expected, strict=True))
    assert torch.equal(split.run_suffix(boundaries[0]), expected[0])
    assert all(map(torch.equal, split.model.buffers(), whole.buffers()))


def test_what_both_sides_write_is_refused_where_another_call_came_between() -> None:
    split = _split("both")
    first, second = split.run_prefix(torch.randn(2, 4)), split.run_prefix(torch.randn(2, 4))
    with pytest.raises(BoundaryError, match="another call, or you, wrote 'count'"):
        split.run_suffix(first)
    split.run_suffix(second)


def test_a_step_is_refused_where_its_forward_would_read_what_another_call_wrote() -> None:
    split = _split("count")
    first, second = split.run_training_prefix(torch.randn(2, 4)), split.run_training_prefix(torch.randn(2, 4))
    with pytest.raises(BoundaryError, match="another call, or you, wrote 'count'"):
        split.train_suffix(first, loss_fn=lambda output, _: output.sum())
    split.train_suffix(second, loss_fn=lambda output, _: output.sum())
