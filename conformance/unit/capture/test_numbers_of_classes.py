"""Numbers and strings of a class of their own, such as numpy's float64, come out of a split as what they are."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.plan.atoms import as_data


class Beside(nn.Module):
    """Gives its second input, and a scale that an attribute holds, beside its result."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.scale = nn.Linear(4, 8), nn.Linear(8, 3), scale

    def forward(self, x: Tensor, k: Any) -> tuple[Tensor, Any, Any]:
        return self.leave(self.enter(x)), k, self.scale


class Two(enum.IntEnum):
    TWO = 2


class Rate(float):
    pass


class Count(int):
    pass


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("one", "plain"),
    [
        (np.float64(0.5), 0.5), (np.float64("inf"), float("inf")), (np.complex128(1j), 1j), (np.str_("a"), "a"),
        (Rate(2), 2.0), (Count(2), 2), (Two.TWO, 2), (Word("a"), "a"),
    ],
)  # fmt: skip
def test_an_input_and_a_result_keep_their_class(one: Any, plain: Any) -> None:
    model, x = Beside(one).eval(), torch.randn(3, 4)
    runtime = prepare_split(model, (torch.randn(2, 4), one), split="after:enter")
    for k in (one, plain, one):  # each has a plan of its own, which no other serves
        with torch.no_grad():
            whole = model(x, k)
        found = runtime.run_suffix(runtime.run_prefix(x, k))
        assert torch.equal(found[0], whole[0])
        for mine, theirs in zip(found[1:], whole[1:], strict=True):
            assert type(mine) is type(theirs)
            assert mine == theirs
    assert as_data(one) != as_data(plain)  # else two plans had one signature
