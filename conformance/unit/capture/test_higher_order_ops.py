"""Higher-order ops and transforms that torch's own functions call, as `flex_attention` does: kept whole, or run as Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

import ariadne
from ariadne import SplitSpec, prepare_split, prepare_split_replay
from ariadne.errors import UnsupportedError


class _Twice(HigherOrderOperator):
    """As `flex_attention` on the CPU, it has no backward; nor has it rules for modes."""

    def __init__(self) -> None:
        super().__init__("twice_of_a_test")

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError("twice has no backward")
        return super().__call__(function, x)


twice = _Twice()


@twice.py_impl(DispatchKey.CompositeExplicitAutograd)
def _composite(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(function(x))


@twice.py_impl(DispatchKey.Autograd)
def _autograd(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return twice(function, x)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Any:
        rows = torch.vmap(torch.vmap(torch.neg))(x)
        return twice(torch.tanh, x) * rows


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.inner, self.leave = nn.Linear(4, 8), inner, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.inner(self.enter(x)))
        return found


@pytest.mark.parametrize(("prepare", "way"), [(prepare_split_replay, "opaque"), (prepare_split, "python")])
def test_an_op_without_a_backward_is_split_for_inference(prepare: Any, way: str) -> None:
    model = Net(ariadne.opaque(Inner()) if way == "opaque" else Inner())
    whole, x = copy.deepcopy(model), torch.randn(2, 4)
    runtime = prepare(model, (x,), split="after:enter", fallback="refuse" if way == "opaque" else "python")
    for batch in (1, 3):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            expected = whole(x)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), expected)
    with pytest.raises(NotImplementedError, match="twice has no backward"):
        runtime.train_suffix(runtime.run_training_prefix(x), loss_fn=lambda out, _: out.sum())


@pytest.mark.parametrize("prepare", [prepare_split, prepare_split_replay])
def test_a_transform_within_another_is_refused_with_a_way_out(prepare: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.func \(vmap\) in 'inner'.*ariadne\.opaque\(module\)"):
        prepare(Net(Inner()), (torch.randn(2, 4),), split=SplitSpec("after:enter"))
