"""A tensor that an op may do without is taken away after preparing: what the op raises then is said as what was changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec
from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

X = numbers(3, 4)
GONE = "the buffer 'running_mean' of '1', which the plan reads, is gone"


def split_of(model: nn.Module, cut: str) -> SplitRuntime:
    return prepare_split(model, (X,), split=SplitSpec(cut, trainable=True))


def agree(model: nn.Module, runtime: SplitRuntime) -> None:
    with torch.no_grad():
        same(model(X), runtime.run_suffix(runtime.run_prefix(X)), "the results")


def step(runtime: SplitRuntime) -> None:
    boundary = runtime.run_training_prefix(X)
    _, found = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().mean())
    runtime.backward_prefix(boundary, found)


@pytest.mark.parametrize("cut", ["after:0", "after:1"], ids=["suffix", "prefix"])
def test_running_statistics_set_to_none_are_named(cut: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    runtime = split_of(model, cut)
    model[1].running_mean = model[1].running_var = None  # then the model takes the batch's own
    with pytest.raises(ModuleError, match=GONE):
        runtime.run_suffix(runtime.run_prefix(X))
    with pytest.raises(ModuleError, match=GONE):
        step(runtime)
    agree(model, split_of(model, cut))


def test_a_bias_set_to_none_is_followed() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    runtime = split_of(model, "after:1")
    model[2].bias = None
    agree(model, runtime)
    step(runtime)
