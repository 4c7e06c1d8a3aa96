"""Ops that may give back what they were given, and questions for a dtype: followed, or refused for what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.errors import UnsupportedError
from conformance.unit.trap_kit import numbers

X = numbers(2, 4).float()


class Net(nn.Module):
    """Two layers, and what is done between them."""

    def __init__(self, does: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.does = nn.Linear(4, 4), nn.Linear(4, 4), does
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.does(self.first(x), self.last.weight))


@torch.no_grad()
@pytest.mark.parametrize(
    "does",
    [
        lambda h, w: h.to(torch.result_type(h, w)),
        lambda h, w: h * 2 if torch.result_type(h, 1.5) == torch.float32 else h,
    ],
)
def test_a_dtype_that_an_op_tells_is_followed(does: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Net(does)
    split = prepare_split(model, (X,), split="after:first")
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))


@torch.no_grad()
def test_whether_an_op_gave_back_its_argument_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"compares by `is`: whether an op such as contiguous\(\)"):
        prepare_split(Net(lambda h, w: h * 2 if h.contiguous() is h else h), (X,), split="after:first")
