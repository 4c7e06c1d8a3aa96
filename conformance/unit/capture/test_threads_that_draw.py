"""The random generators are every thread's: what another draws while a model is captured, it draws once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.errors import UnsupportedError

PAUSE = 2e-4


class Net(nn.Module):
    """As many ops as the batch has rows, so that each batch has a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.ones_(self.a.weight)  # were all of `relu(a(x))` zero, no factor could be told from another

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(x.shape[0]):
            h = torch.relu(h)
        return self.b(self.between(h))

    def between(self, h: Tensor) -> Tensor:
        return h


@contextmanager
def another(draw: Callable[[], float]) -> Iterator[list[float]]:
    """While in the block, another thread draws; all its numbers."""
    found: list[float] = []
    done = threading.Event()

    def run() -> None:
        while not done.wait(PAUSE):
            found.append(draw())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def torchs() -> float:
    return float(torch.rand(1, dtype=torch.float64))


@pytest.mark.parametrize("draw", [torchs, random.random])
def test_what_another_thread_draws_meanwhile_comes_once(draw: Callable[[], float]) -> None:
    with another(draw) as found:
        split = prepare_split(Net(), (torch.ones(2, 4),), split="50%")
        for batch in range(3, 9):
            split.run_suffix(split.run_prefix(torch.ones(batch, 4)))
    assert len(found) == len(set(found)) > 10


class Gated(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * random.random()


class Imported(Net):
    draw = staticmethod(random.random)

    def between(self, h: Tensor) -> Tensor:
        return h * self.draw()


class Chosen(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * random.choice([1.0, 2.0, 3.0])


class Hidden(Net):
    """By no call that a profiler sees: the numbers are other ones when forward runs again."""

    def between(self, h: Tensor) -> Tensor:
        return h * partial(random.random)()


@pytest.mark.parametrize("kind", [Gated, Imported, Chosen, Hidden])
def test_what_forward_itself_draws_from_python_is_refused_whoever_draws_beside_it(kind: type[Net]) -> None:
    for beside in (torchs, random.random):
        with (
            another(beside),
            pytest.raises(UnsupportedError, match=r"forward (draws from random|gives another result)"),
        ):
            prepare_split(kind(), (torch.ones(2, 4),), split="50%")
    with pytest.raises(UnsupportedError, match=r"forward (draws from random|gives another result)"):
        prepare_split(kind(), (torch.ones(2, 4),), split="50%")


class Dropped(Net):
    def between(self, h: Tensor) -> Tensor:
        for _ in range(200):
            h = nn.functional.dropout(h, 0.1)
        return h


def often() -> None:
    for _ in range(20):
        prepare_split(Dropped(), (torch.ones(2, 4),), split="50%")


def test_where_forward_draws_too_it_is_said_that_nobody_else_may() -> None:
    with another(torchs), pytest.raises(UnsupportedError, match="another thread drew from torch's random generator"):
        often()


@pytest.mark.parametrize("kind", [Net, Dropped])
def test_where_nobody_else_draws_the_generators_are_left_as_found(kind: type[Net]) -> None:
    model = kind()
    stood = torch.get_rng_state(), random.getstate()
    prepare_split(model, (torch.ones(2, 4),), split="50%")
    assert torch.equal(stood[0], torch.get_rng_state())
    assert stood[1] == random.getstate()
