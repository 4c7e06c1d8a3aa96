"""A suffix in Python looks through the model's modules where one was written, and not at each call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import BoundaryError
from ariadne.guards import VERSION

X = torch.randn(2, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.second(self.first(x))
        return h * (1.0 + random.random())


def made(fallback: str, trainable: bool = False) -> Any:
    spec = SplitSpec("after:first", trainable=trainable, max_paths=1)
    return prepare_split(Net().train(trainable), (X,), split=spec, fallback=fallback)  # type: ignore[arg-type]


def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().sum()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """The modules whose parts are listed while in the block."""
    walked: list[nn.Module] = []
    plain = nn.Module.named_modules

    def named_modules(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walked.append(self)
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", named_modules)
        yield walked


@pytest.mark.skipif(VERSION is None, reason="this Python keeps no versions of dicts")
@pytest.mark.parametrize("fallback", ["python", "python-suffix"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_suffix_lists_no_modules(fallback: str, as_bytes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    split = made(fallback)
    for _ in range(2):
        boundary = split.run_prefix(X)
        if as_bytes:
            boundary = BoundaryPayload.from_bytes(boundary.to_bytes())
        with counted(monkeypatch) as walked:
            split.run_suffix(boundary)
    assert not walked


@pytest.mark.skipif(VERSION is None, reason="this Python keeps no versions of dicts")
@pytest.mark.parametrize("fallback", ["python", "python-suffix"])
def test_the_suffix_of_a_step_lists_no_modules(fallback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split = made(fallback, trainable=True)
    for _ in range(2):
        boundary = split.run_training_prefix(X)
        with counted(monkeypatch) as walked:
            _, gradients = split.train_suffix(boundary, loss_fn=loss_fn)
        split.backward_prefix(boundary, gradients)
    assert not walked


def test_a_cache_of_casts_that_is_switched_off_between_the_halves_is_named() -> None:
    split = made("python")
    boundary = split.run_prefix(X)
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(not was)
    try:
        with pytest.raises(BoundaryError, match="is_autocast_cache_enabled"):
            split.run_suffix(boundary)
    finally:
        torch.set_autocast_cache_enabled(was)
