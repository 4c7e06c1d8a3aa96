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


class _Hands(_Counts):
    def forward(self, x: Tensor) -> Any:
        if random.random() > 2:
            return x
        self.count += x.detach().sum(0)
        return self.last(self.first(x)), self.count


def test_in_training_state_that_forward_returns_comes_out_as_its_prefix_left_it() -> None:
    torch.manual_seed(0)
    model, calls = _Hands("count"), [torch.randn(2, 4) for _ in range(2)]
    split = prepare_split(model, (calls[0],), split="after:first", fallback="python")
    whole, boundaries = copy.deepcopy(model), [split.run_training_prefix(x) for x in calls]
    sent = [type(b).from_bytes(b.to_bytes()) for b in boundaries]

    def loss_fn(output: tuple[Tensor, Tensor], _: Any) -> Tensor:
        return output[0].sum() * output[1].sum()

    with torch.no_grad():
        expected = [loss_fn(whole(x), None) for x in calls]
    with pytest.raises(BoundaryError, match="another call, or you, wrote 'count'"):
        split.train_suffix(boundaries[0], loss_fn=loss_fn)
    for boundary, loss in zip(sent, expected, strict=True):
        assert torch.equal(split.train_suffix(boundary, loss_fn=loss_fn)[0], loss)
    assert torch.equal(split.train_suffix(boundaries[1], loss_fn=loss_fn)[0], expected[1])
