"""Within `torch.nn.utils.parametrize.cached()`: what preparing runs keeps no weight there, and takes none from there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ariadne import PythonSplit, SplitSpec, prepare_split
from ariadne.stopped import proof
from conformance.unit.trap_kit import numbers, same

X = numbers(2, 4)


class Symmetric(nn.Module):
    """The upper half of a matrix, on both sides of the diagonal."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    parametrize.register_parametrization(model[1], "weight", Symmetric())
    return model


def loss_of(out: Tensor, _: object = None) -> Tensor:
    return out.square().mean()


def trained_within(model: nn.Module) -> None:
    with parametrize.cached():
        before = loss_of(model(X))  # which leaves a weight there, with its graph
        split = prepare_split(model, (X,), split=SplitSpec("after:0", trainable=True), fallback="python")
        assert type(split) is PythonSplit
        before.backward()
    model.zero_grad()
    with parametrize.cached():
        split.resplit("after:1").warmup(X)
        boundary = split.run_training_prefix(X)
        _, found = split.train_suffix(boundary, loss_fn=loss_of)
        split.backward_prefix(boundary, found)


def test_a_python_split_prepared_within_trains_what_is_parametrized() -> None:
    model = net()
    twin = copy.deepcopy(model)
    with parametrize.cached():
        loss_of(twin(X)).backward()
    trained_within(model)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        same(theirs.grad, mine.grad, "the gradients")


@pytest.mark.planted
def test_what_the_proof_ran_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def all_the_same() -> Iterator[None]:
        yield

    monkeypatch.setattr(proof, "no_weights_cached", all_the_same)
    model = net()
    with parametrize.cached():
        prepare_split(model, (X,), split=SplitSpec("after:0", trainable=True), fallback="python")
        loss_of(model(X)).backward()
    assert model[1].parametrizations.weight.original.grad is None
