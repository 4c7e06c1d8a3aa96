"""Planted bugs of pipelines, each in the processes of a run: the comparison with the whole model notices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from ariadne.pipeline import Part, draws, later, pipeline, stage, steps
from ariadne.pipeline.flight import back
from ariadne.pipeline.message import Message
from ariadne.pipeline.micro import merged
from conformance.unit.pipeline.everything import runs
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


def _real_alone(self: Any, chunk: int) -> Message:
    """Complex numbers lose their imaginary part."""
    found = _take(self, chunk)
    return Message(found.data, {n: t.real.to(t.dtype) if t.is_complex() else t for n, t in found.tensors.items()})


def _nothing_through_frozen(flight: Any, loss: Any, gradients: Any, shares: Any, *rest: Any) -> Any:
    """A part that trains nothing does not walk back for the parts before it."""
    if not any(p.requires_grad for p in rest[2]):
        return dict.fromkeys(flight.labels), dict(shares)
    return back(flight, loss, gradients, shares, *rest)


_fly = Part.fly


def _flown_twice(self: Any, args: Any, kwargs: Any, trains: bool) -> Any:
    """A part runs each micro-batch twice."""
    if trains:
        with torch.random.fork_rng():
            _fly(self, args, kwargs, False)
    return _fly(self, args, kwargs, trains)


def _as_if_training(self: Any, args: Any, kwargs: Any, trains: bool) -> Any:
    """An evaluation moves the parameters' gradients on: it counts as a step."""
    found = _fly(self, args, kwargs, trains)
    if not trains:
        for p in self.parameters():
            p.grad = torch.ones_like(p)
    return found


def _ragged_last_first(plan: Any, args: Any, kwargs: Any, count: int) -> Any:
    """The smaller micro-batches come first."""
    x, *rest = args
    sizes = sorted(len(piece) for piece in x.tensor_split(count))
    return [((piece, *rest), {}) for piece in x.split(sizes)]


def _sizes_of_the_first_step(outputs: Any, sizes: Any, plans: Any) -> Any:
    """Outputs are put together as in the first step that this rank saw."""
    first = steps.__dict__.setdefault("_first_sizes", list(sizes))
    return merged([o[:size] for o, size in zip(outputs, first, strict=True)], first, plans)


def _along_the_first_dim(outputs: Any, sizes: Any, plans: Any) -> Any:
    """Whatever is as large as its micro-batch is joined."""
    return merged(outputs, sizes)


def _decaying(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """The second walk of zero-bubble schedules puts a gradient in place of those that are there."""
    leaf.grad = gradient.clone()


def _none_as_zeros(flight: Any, *rest: Any) -> Any:
    """Where no gradient came, zeros go back, as from torch's own stage."""
    arrived, onwards = back(flight, *rest)
    pairs = zip(flight.labels, flight.taken, strict=True)
    return {label: torch.zeros_like(t) if arrived[label] is None else arrived[label] for label, t in pairs}, onwards


@contextmanager
def _own_generators(self: Any, state: Any) -> Iterator[None]:
    """Each part draws from where its rank's generator stands."""
    yield


def _nothing_moves(*_: Any) -> tuple[()]:
    """The first part foresees no draws of the others."""
    return ()


def _unfinished(stages: Any) -> None:
    """Parts that share a parameter don't get its gradient."""


def _patched(owner: Any, name: str, by: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, by)


# What is wrong: the net that shows it, the schedule, and the bug.
PLANTED: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "a value of another micro-batch": ("skip", "1F1B", _patched(stage._Box, "take", _of_the_first_micro_batch)),
    "a share twice": ("tied", "1F1B", _patched(stage, "back", _shares_twice)),
    "shared gradients not completed": ("tied", "1F1B", _patched(steps, "finish", _unfinished)),
    "the batch of an earlier micro-batch": ("integers", "1F1B", _patched(stage._Box, "take", _stale_batch)),
    "no imaginary part": ("integers", "GPipe", _patched(stage._Box, "take", _real_alone)),
    "generators of their own": ("dropout", "1F1B", _patched(draws.Generators, "at", _own_generators)),
    "what draws is taken for still": ("dropout", "1F1B", _patched(draws, "moving", _nothing_moves)),
    "statistics moved twice": ("norm", "1F1B", _patched(Part, "fly", _flown_twice)),
    "no walk through a frozen part": (
        "frozen_middle",
        "Interleaved1F1B",
        _patched(stage, "back", _nothing_through_frozen),
    ),
    "an evaluation that counts as a step": ("norm", "1F1B", _patched(Part, "fly", _as_if_training)),
    "smaller micro-batches first": ("skip", "GPipe", _patched(pipeline, "parted", _ragged_last_first)),
    "the sizes of another step": ("skip", "LoopedBFS", _patched(steps, "merged", _sizes_of_the_first_step)),
    "joined by accident": ("time_first", "GPipe", _patched(steps, "merged", _along_the_first_dim)),
    "the last micro-batch alone": ("skip", "ZBVZeroBubble", _patched(later, "accumulate", _decaying)),
    "zeros for no gradient": ("images", "1F1B", _patched(stage, "back", _none_as_zeros)),
}


def planted(rank: int, world: int) -> dict[str, bool]:
    """Which of the bugs make a difference on this rank, or an error."""
    found = {}
    for name, (case, schedule, plant) in PLANTED.items():
        parts = max(n for n in (world, 2 * world) if runs(schedule, n, world))
        with plant():
            try:
                found[name] = bool(train(rank, world, case, schedule, parts, 4))
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


@pytest.mark.parametrize("case", sorted({case for case, _, _ in PLANTED.values()}))
def test_without_a_bug_nothing_differs(case: str) -> None:
    for error, wrong in run(train, 2, case, "1F1B", 2, 4):
        assert error is None, wrong
        assert not wrong
