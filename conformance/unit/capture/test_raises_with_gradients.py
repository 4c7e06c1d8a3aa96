"""Forwards that raise with gradients and run without them: they are split for inference, and told of in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_pipeline, prepare_split
from ariadne.errors import SpecError, UnsupportedError
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Net(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between, self.calls = nn.Linear(4, 8), nn.Linear(8, 8), between, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x).relu()))


def chunk(m: Any, h: Tensor) -> Tensor:
    one, other = h.chunk(2, 1)
    one.add_(1)
    return torch.cat([one, other], 1)


def unbind(m: Any, h: Tensor) -> Tensor:
    h.unbind(1)[0].zero_()
    return h


def weight(m: Any, h: Tensor) -> Tensor:
    m.last.weight.mul_(1)
    return h


def out(m: Any, h: Tensor) -> Tensor:
    return torch.add(h, 1, out=torch.empty(0))


def array(m: Any, h: Tensor) -> Tensor:
    h.numpy()
    return h * 2


def asserts(m: Any, h: Tensor) -> Tensor:
    assert not torch.is_grad_enabled(), "inference only"
    return h * 2


RAISING = [chunk, unbind, weight, out, asserts]


@pytest.mark.parametrize("between", RAISING)
def test_it_is_split_for_inference_and_raises_as_the_model_does_in_training(between: Any) -> None:
    model = Net(between)
    runtime = prepare_split(model, (X,), split="after:first")
    for batch in (2, 3):
        x = numbers(batch, 4)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    with pytest.raises((RuntimeError, AssertionError)) as whole:
        model(X)
    with pytest.raises(whole.type) as split:
        runtime.run_training_prefix(X)
    assert str(split.value) == str(whole.value)


def test_a_plan_for_training_is_refused_with_what_forward_raises() -> None:
    told = "trainable=True asks for what can't be: forward runs without gradients alone.*Output 0 of Split(Backward0)? is a view"
    with pytest.raises(SpecError, match=told):
        prepare_split(Net(chunk), (X,), split=SplitSpec("after:first", trainable=True))


def test_a_pipeline_of_it_runs() -> None:
    model = Net(chunk)
    pipeline = prepare_pipeline(model, (X,), boundaries=["after:first"])
    with torch.no_grad():
        assert torch.equal(pipeline(X), model(X))


def test_what_raises_without_gradients_too_comes_through_as_it_is() -> None:
    def always(m: Any, h: Tensor) -> Tensor:
        raise ValueError("gradients are on" if torch.is_grad_enabled() else "gradients are off")

    with pytest.raises(ValueError, match="gradients are on"):
        prepare_split(Net(always), (X,), split="after:first")


def test_what_no_plan_holds_without_gradients_is_refused_by_name() -> None:
    def counts(m: Any, h: Tensor) -> Tensor:
        chunk(m, h)
        m.calls += h.shape[0]
        return h * m.calls

    with pytest.raises(UnsupportedError, match="keeps state in Python"):
        prepare_split(Net(counts), (X,), split="after:first")
