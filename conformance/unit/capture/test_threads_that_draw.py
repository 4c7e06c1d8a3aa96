"""The random generators are every thread's: what another draws while a model is captured, it draws once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError

PAUSE = 2e-4
HOUR = 3600.0


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
def another(draw: Callable[[], float], pause: float = PAUSE) -> Iterator[list[float]]:
    """While in the block, another thread draws, and pauses for some seconds; all its numbers."""
    found: list[float] = []
    done = threading.Event()

    def run() -> None:
        while not done.wait(pause):
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


def numpys() -> float:
    return float(numpy.random.rand())


class Asking(torch.autograd.Function):
    """It might draw, for all that a plan knows of it; while its backward runs, another thread does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, found: SimpleQueue[float]) -> Tensor:
        ctx.found = found  # no list, which would be left as it was found
        return h / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        in_a_thread(lambda: ctx.found.put(torchs()))
        return grad / 2, None


def test_what_another_thread_draws_comes_once_beside_a_function_that_might_draw() -> None:
    drawn: SimpleQueue[float] = SimpleQueue()

    class Halved(Net):
        def between(self, h: Tensor) -> Tensor:
            out: Tensor = Asking.apply(h, drawn)
            return out

    with another(torchs, HOUR):
        prepare_split(Halved(), (torch.ones(2, 4),), split=SplitSpec("50%", trainable=True))
    found = [drawn.get() for _ in range(drawn.qsize())]
    assert len(found) == len(set(found)) > 1


@pytest.mark.parametrize("draw", [torchs, random.random, numpys])
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


class GatedByNumpy(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * float(numpy.random.rand())


class ImportedFromNumpy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draw = numpy.random.uniform

    def between(self, h: Tensor) -> Tensor:
        return h * float(self.draw())


class SteadyByNumpy(Net):
    """What it draws is never seen in what it gives."""

    def between(self, h: Tensor) -> Tensor:
        return h if UNIFORM() < 2 else -h


UNIFORM = numpy.random.uniform


class Hidden(Net):
    """By no call that a profiler sees: the numbers are other ones when forward runs again."""

    def between(self, h: Tensor) -> Tensor:
        return h * partial(random.random)()


@pytest.mark.parametrize("kind", [Gated, Imported, Chosen, Hidden, GatedByNumpy, ImportedFromNumpy, SteadyByNumpy])
def test_what_forward_itself_draws_from_python_is_refused_whoever_draws_beside_it(kind: type[Net]) -> None:
    for beside in (torchs, numpys if "Numpy" in kind.__name__ else random.random):
        with (
            another(beside),
            pytest.raises(UnsupportedError, match=r"forward (draws from (numpy\.)?random|gives another result)"),
        ):
            prepare_split(kind(), (torch.ones(2, 4),), split="50%")
    with pytest.raises(UnsupportedError, match=r"forward (draws from (numpy\.)?random|gives another result)"):
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


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


POOL = ThreadPoolExecutor(1)


DRAWN: SimpleQueue[float] = SimpleQueue()  # no list, which would be left as it was found


def meanwhile(draw: Callable[[], float]) -> None:
    DRAWN.put(POOL.submit(draw).result())


class Masked(Net):
    """While it runs, another thread draws from a generator that it does not draw from."""

    def between(self, h: Tensor) -> Tensor:
        meanwhile(random.random)
        return nn.functional.dropout(h, 0.5)


class Counted(Net):
    calls = 0

    def between(self, h: Tensor) -> Tensor:
        meanwhile(self.draw)
        self.calls += 1
        return h * self.calls

    draw = staticmethod(torchs)


class CountedBeside(Counted):
    draw = staticmethod(random.random)


@pytest.mark.parametrize(("kind", "fallback"), [(Masked, "refuse"), (Counted, "python"), (CountedBeside, "python")])
def test_generators_that_forward_does_not_draw_from_are_left_to_other_threads(kind: type[Net], fallback: Any) -> None:
    POOL.submit(int).result()  # so that it is there
    split = prepare_split(kind(), (torch.ones(2, 4),), split="after:a", fallback=fallback)
    split.run_suffix(split.run_prefix(torch.ones(2, 4)))
    found = [DRAWN.get() for _ in range(DRAWN.qsize())]
    assert len(found) == len(set(found)) > 2


class Elsewhere(Net):
    """Something that another thread does between the layers."""

    def __init__(self, hand: Callable[[Callable[[], object]], object], work: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.hand, self.work = hand, work
        self.register_buffer("count", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        self.hand(lambda: self.work(self, h))
        return h


def pooled(work: Callable[[], object]) -> None:
    POOL.submit(work).result()


@pytest.mark.parametrize("hand", [in_a_thread, pooled])
@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda m, h: torch.rand(3), r"aten\.rand\.default .* which draws random numbers"),
        (lambda m, h: nn.functional.dropout(torch.ones(3)), "which draws random numbers"),
        (
            lambda m, h: m.count.add_(1),
            r"aten\.add_\.Tensor .* which writes into a tensor that the thread did not make",
        ),
        (lambda m, h: h.mul_(2), "which writes into a tensor that the thread did not make"),
    ],
)
def test_what_forward_has_another_thread_draw_or_write_is_refused(hand: Any, work: Any, words: str) -> None:
    before = torch.get_rng_state()
    model = Elsewhere(hand, work).eval()
    torch.set_rng_state(before)
    with pytest.raises(UnsupportedError, match=f"forward has another thread run .*{words}"):
        prepare_split(model, (torch.ones(2, 4),), split="after:a")
    assert model.count == 0


@pytest.mark.parametrize("hand", [in_a_thread, pooled])
def test_what_a_thread_does_to_tensors_of_its_own_is_let_be(hand: Any) -> None:
    model = Elsewhere(hand, lambda m, h: torch.zeros(4).view(2, 2).add_(1).t().mul_(2)).eval()
    runtime = prepare_split(model, (torch.ones(2, 4),), split="after:a")
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
