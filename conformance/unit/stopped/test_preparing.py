"""A Python split is measured and proven under the modes that it is prepared in, and that its forward can run in."""

import array
import collections
import copy
import itertools
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import PythonSplit, SplitSpec, prepare_split
from ariadne.errors import UnsupportedError

X = torch.linspace(-1, 1, 8).view(2, 4)


def trained(runtime: PythonSplit, x: torch.Tensor) -> None:
    """One step, whose loss is the output's mean square."""
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda out, _: out.float().square().mean())
    runtime.backward_prefix(boundary, gradients)


def assert_trained_alike(model: nn.Module, whole: nn.Module) -> None:
    """The two have equal gradients, on all parameters."""
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


class Scaled(nn.Module):
    """Two layers, on an input that Python's own random numbers scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x * (1 + random.random())).relu())
        return y


def test_weights_that_autocast_keeps_cast_are_seen_to_be_used_after_the_cut() -> None:
    model = Scaled()
    whole = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # casts are kept while the block lasts
        spec = SplitSpec("after:a", trainable=True)
        runtime = prepare_split(model, (X,), split=spec, fallback="python")
    assert isinstance(runtime, PythonSplit)
    assert [len(runtime.prefix_parameters()), len(runtime.suffix_parameters())] == [2, 2]
    for run in (lambda: trained(runtime, X), lambda: whole(X).float().square().mean().backward()):
        random.seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            run()
    assert_trained_alike(model, whole)


class Penalized(nn.Module):
    """A critic whose loss has a penalty of its gradient in it, as WGAN-GP's: forward can't run without gradients.

    Python draws a number, so that no graph holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = (x * 0.5).requires_grad_(random.random() >= 0)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        loss: torch.Tensor = self.critic(x).mean() + ((slope.norm(2, 1) - 1) ** 2).mean()
        return loss


def test_a_forward_that_needs_gradients_is_proven_in_training_alone() -> None:
    model = Penalized()
    whole = copy.deepcopy(model)
    spec = SplitSpec("after:critic.0#2", trainable=True)
    runtime = prepare_split(model, (X,), split=spec, fallback="python")
    assert isinstance(runtime, PythonSplit)
    runtime.learn((X + 1,))
    assert runtime.stays == ""
    trained(runtime, X)
    whole(X).square().mean().backward()
    assert_trained_alike(model, whole)


@pytest.mark.parametrize(
    ("spec", "fallback", "told"),
    [
        (SplitSpec("after:critic.0#2"), "python", "runs with gradients alone.*ask for training"),
        (
            SplitSpec("after:critic.0#2", trainable=True),
            "python-suffix",
            "runs with gradients alone.*fallback='python'",
        ),
    ],
)
def test_where_a_forward_that_needs_gradients_would_run_without_the_error_says_so(
    spec: SplitSpec, fallback: str, told: str
) -> None:
    with pytest.raises(UnsupportedError, match=told):
        prepare_split(Penalized(), (X,), split=spec, fallback=fallback)  # type: ignore[call-overload]


class Delayed(nn.Module):
    """Adds what it was given in the call before, which a Python generator keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.line = self._line()
        next(self.line)

    @staticmethod
    def _line() -> Generator[torch.Tensor, torch.Tensor, None]:
        before, now = None, (yield torch.empty(0))
        while True:
            before, now = now, (yield now if before is None else before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        y: torch.Tensor = self.b(h + self.line.send(h.detach()))
        return y


def test_a_python_generator_that_forward_moves_on_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"moves on the Python generator 'line'.*made anew"):
        prepare_split(Delayed().eval(), (X,), split="after:a", fallback="python")


class Counts(nn.Module):
    """Two layers; from its fourth call on what lies between them is halved, by a count that is no plain attribute."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.a, self.b, self.held = nn.Linear(4, 8), nn.Linear(8, 2), [count]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held[0][0] += 1
        y: torch.Tensor = self.b(self.a(x) * (0.5 if self.held[0][0] > 3 else 1.0))
        return y


@pytest.mark.parametrize(
    "make", [lambda: array.array("i", [0]), lambda: bytearray(1), lambda: memoryview(bytearray(1))]
)
def test_arrays_and_bytes_are_put_back(make: Callable[[], Any]) -> None:
    model, whole = Counts(make()), Counts(make())
    whole.load_state_dict(model.state_dict())
    runtime = prepare_split(model, (X,), split="after:a", fallback="python")
    assert model.held[0][0] == 0
    for _ in range(5):
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), whole(X))


FOUND, NUMBERS = bytearray(1), itertools.count()


class Rings(nn.Module):
    """Two layers; `takes` says which row of a tensor outside is written."""

    def __init__(self, takes: Callable[[], int], rows: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b, self.takes, self.rows = nn.Linear(4, 8), nn.Linear(8, 2), takes, [rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.rows[0][self.takes()] += 1
        y: torch.Tensor = self.b(h)
        return y


def from_bytes() -> int:
    FOUND[0] += 1
    return FOUND[0] - 1


def test_bytes_outside_are_put_back() -> None:
    model = Rings(from_bytes, torch.zeros(4))
    runtime = prepare_split(model, (X,), split="after:a", fallback="python")
    runtime.run_suffix(runtime.run_prefix(X))
    assert model.rows[0].tolist() == [1, 0, 0, 0]


def rings_of(iterator: Iterator[int]) -> Callable[[], int]:
    return lambda: next(iterator)


@pytest.mark.parametrize(
    ("takes", "words"),
    [
        (lambda: next(NUMBERS), "the count in the global 'NUMBERS'"),
        (rings_of(iter([*range(4)] * 20)), "the list_iterator in the variable 'iterator'"),
        (rings_of(map(int, [*range(4)] * 20)), "the map in the variable 'iterator'"),
    ],
)
def test_an_iterator_outside_that_is_moved_on_is_refused(takes: Callable[[], int], words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"forward moves on {words}"):
        prepare_split(Rings(takes, torch.zeros(4)), (X,), split="after:a", fallback="python")


class Numbers:
    """An object that holds an iterator."""

    def __init__(self) -> None:
        self.ids = itertools.count()


class Numbered(nn.Module):
    """Two layers, and one of what `keep` holds; `take` takes a number from it."""

    def __init__(self, keep: Any, take: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b, self.keep, self.take = nn.Linear(4, 8), nn.Linear(8, 2), keep, take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x) * (1 + self.take(self.keep)))
        return y


LED_TO: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "method": (lambda: itertools.count().__next__, lambda f: f()),
    "methods in a list": (lambda: [itertools.count().__next__, itertools.count().__next__], lambda fs: fs[0]()),
    "chain": (lambda: itertools.chain([1.0, 2.0], itertools.repeat(3.0)).__next__, lambda f: f()),
    "factory": (lambda: collections.defaultdict(itertools.count(1).__next__), lambda table: table[len(table)]),
    "object": (Numbers, lambda held: next(held.ids)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LED_TO)
def test_an_iterator_that_preparing_moves_on_is_named_wherever_it_stands(name: str) -> None:
    make, take = LED_TO[name]
    with pytest.raises(UnsupportedError, match=r"forward moves on the (count|chain) in 'keep' of the model"):
        prepare_split(Numbered(make(), take), (X,), split="after:a", fallback="python")
