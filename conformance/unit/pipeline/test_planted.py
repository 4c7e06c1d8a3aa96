"""Planted bugs of pipelines, each in the processes of a run: the comparison with the whole model notices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from ariadne.pipeline import draws, stage, steps
from ariadne.pipeline.flight import back
from ariadne.pipeline.message import Message
from conformance.unit.pipeline.ranks import run, train

_take = stage._Box.take


def _of_the_first_micro_batch(self: Any, chunk: int) -> Message:
    """A value that passes through is that of the first micro-batch, where it fits."""
    found = _take(self, chunk)
    kept = self.__dict__.setdefault("first", dict(found.tensors))
    stale = {name: kept[name] for name, t in found.tensors.items() if name in kept and kept[name].shape == t.shape}
    return Message(found.data, {**found.tensors, **dict(list(stale.items())[:1])})


def _shares_twice(flight: Any, loss: Any, gradients: Any, shares: Any, *rest: Any) -> Any:
    """What later parts have for a shared parameter counts twice."""
    return back(flight, loss, gradients, {name: 2 * t for name, t in shares.items()}, *rest)


def _stale_batch(self: Any, chunk: int) -> Message:
    """The batch of an earlier micro-batch."""
    found = _take(self, chunk)
    if len(found.data) < 7:
        return found
    batch = stage.__dict__.setdefault("_stale", found.data[2])
    return Message((*found.data[:2], batch, *found.data[3:]), found.tensors)


@contextmanager
def _own_generators(self: Any, state: Any) -> Iterator[None]:
    """Each part draws from where its rank's generator stands."""
    yield


def _unfinished(stages: Any) -> None:
    """Parts that share a parameter don't get its gradient."""


PLANTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "a value of another micro-batch": (
        "skip",
        lambda: mock.patch.object(stage._Box, "take", _of_the_first_micro_batch),
    ),
    "a share twice": ("tied", lambda: mock.patch.object(stage, "back", _shares_twice)),
    "the batch of an earlier micro-batch": ("integers", lambda: mock.patch.object(stage._Box, "take", _stale_batch)),
    "generators of their own": ("dropout", lambda: mock.patch.object(draws.Generators, "at", _own_generators)),
    "shared gradients not completed": ("tied", lambda: mock.patch.object(steps, "finish", _unfinished)),
}


def planted(rank: int, world: int) -> dict[str, bool]:
    """Which of the bugs make a difference on this rank, or an error."""
    found = {}
    for name, (case, plant) in PLANTED.items():
        with plant():
            try:
                found[name] = bool(train(rank, world, case, "1F1B", world, 4))
            except Exception:  # told as an error is noticed, too
                found[name] = True
    return found


@pytest.mark.planted
def test_every_planted_bug_is_noticed_on_some_rank() -> None:
    results = run(planted, 2)
    for error, result in results:
        assert error is None, result
    missed = [name for name in PLANTED if not any(result[name] for _, result in results)]
    assert not missed


@pytest.mark.parametrize("case", sorted({case for case, _ in PLANTED.values()}))
def test_without_a_bug_nothing_differs(case: str) -> None:
    for error, wrong in run(train, 2, case, "1F1B", 2, 4):
        assert error is None, wrong
        assert not wrong
