"""A model whose own gradients differ from run to run, as some ops' do on CUDA: what is held against it, and how it is told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import VerificationError
from ariadne.runtime.proof import beyond_spread, deterministic
from ariadne.runtime.variant import Variant

NOISE = itertools.count(1)
RUNS = itertools.count(1)  # no attribute of a class: what a run counts there is put back after it


class Noisy(torch.autograd.Function):
    """Its backward is off by a little, each time by another; exact under deterministic algorithms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if torch.are_deterministic_algorithms_enabled() else grad * (1 + next(NOISE) * 1e-3)


class NoisyAlways(Noisy):
    """Nothing makes it exact."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + next(NOISE) * 1e-3)


class Net(nn.Module):
    def __init__(self, function: type[Noisy]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.function.apply(self.a(x)))
        return found


def test_gradients_that_differ_from_run_to_run_are_held_under_deterministic_algorithms() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    with pytest.warns(UserWarning, match=r"differ from run to run .* under torch.use_deterministic_algorithms\(True\)"):
        split = prepare_split(Net(Noisy), (torch.randn(2, 4),), split=SplitSpec("after:a", trainable=True))
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic) == before
    x = torch.randn(3, 4)
    with deterministic():
        boundary = split.run_training_prefix(x)
        _, gradients = split.train_suffix(boundary, None, loss_fn=lambda output, _: output.sum())
        split.backward_prefix(boundary, gradients)
        mine = [p.grad.clone() for p in split.model.parameters() if p.grad is not None]
        split.model.zero_grad()
        split.model(x).sum().backward()
    assert all(
        torch.equal(g, p.grad) for g, p in zip(mine, split.model.parameters(), strict=True) if p.grad is not None
    )


def test_what_nothing_makes_deterministic_is_held_to_the_spread_of_its_own_runs() -> None:
    with pytest.warns(UserWarning, match=r"own gradients differ from run to run .* equal where both repeat"):
        prepare_split(Net(NoisyAlways), (torch.randn(2, 4),), split=SplitSpec("after:a", trainable=True))
    assert not torch.are_deterministic_algorithms_enabled()


class Asks(Net):
    """Asks for the setting under which its gradients would repeat themselves: its plan holds under the other alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if torch.are_deterministic_algorithms_enabled() else x + 1)


def test_a_plan_that_asks_for_deterministic_algorithms_is_not_run_under_others() -> None:
    with pytest.warns(UserWarning, match="no further from them than 4 times what they do"):
        prepare_split(Asks(Noisy), (torch.randn(2, 4),), split=SplitSpec("after:a", trainable=True))


def test_a_model_that_need_not_train_is_served() -> None:
    model = Net(NoisyAlways)
    split = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("after:a", trainable=False))
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(split.run_suffix(split.run_prefix(x)), model(x))


class Exact(Noisy):
    """Exact."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Doubled(Noisy):
    """Twice the gradient, each time."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Exact, "differ from the model's at batch 2"),
        (Noisy, "under determ"),
        (NoisyAlways, "by more: .* and its own runs by"),
    ],
)
def test_a_wrong_gradient_is_no_noise(monkeypatch: pytest.MonkeyPatch, function: type[Noisy], words: str) -> None:
    joined = Variant.joined
    monkeypatch.setattr(Variant, "joined", lambda self, *args, **kwargs: Doubled.apply(joined(self, *args, **kwargs)))
    with pytest.raises(VerificationError, match=words):
        prepare_split(Net(function), (torch.randn(2, 4),), split=SplitSpec("after:a", trainable=True))


def test_what_repeats_itself_must_be_equal_whatever_else_is_noise() -> None:
    noise, one = [torch.full((2,), float(i)) for i in range(3)], torch.ones(2)
    runs: list[list[Tensor | None]] = [[n, one, None] for n in noise]
    assert beyond_spread(runs, [[torch.full((2,), 1.5), one, None]]) is None
    assert "[1], which repeats itself" in str(beyond_spread(runs, [[noise[0], one + 1e-6, None]]))
    assert "[2]: " in str(beyond_spread(runs, [[noise[0], one, one]]))
    assert "[0]: by 98, and its own runs by 2" in str(beyond_spread(runs, [[torch.full((2,), 100.0), one, None]]))
    assert "[0]" in str(beyond_spread(runs, [[torch.full((2,), float("nan")), one, None]]))
    assert "[0]" in str(beyond_spread(runs, [[None, one, None]]))
    assert "[0]" in str(beyond_spread(runs, [[noise[0].double(), one, None]]))
    sparse: list[list[Tensor | None]] = [[torch.eye(2).mul(i + 1j).to_sparse()] for i in range(3)]
    assert beyond_spread(sparse, [[torch.eye(2).mul(1.5 + 1j).to_sparse()]]) is None
    assert "[0]: by 98" in str(beyond_spread(sparse, [[torch.eye(2).mul(100 + 1j).to_sparse()]]))


def test_each_element_is_held_to_its_own_spread() -> None:
    def runs(*elements: tuple[float, ...]) -> list[list[Tensor | None]]:
        return [[torch.tensor(values)] for values in zip(*elements, strict=True)]

    noisy, steady, small = (100.0, 100.1, 100.2, 100.3), (1.0,) * 4, (1e-3, 1.1e-3, 1e-3, 1e-3)
    own = runs(noisy, steady, small)
    assert beyond_spread(own, runs((100.15,), (1.0,), (1.05e-3,))) is None
    assert "by 0.5, and its own runs by 0" in str(beyond_spread(own, runs((100.15,), (1.5,), (1e-3,)))), "beside noise"
    assert "by 0.002" in str(beyond_spread(own, runs((100.15,), (1.0,), (-1e-3,)))), "another sign of a small one"
    assert beyond_spread(own, runs((100.1, 100.2), (1.5, 1.0), (1e-3, 1e-3))) is None, "it was steady by chance"
    wide = beyond_spread(runs((1.0, 1.1, 1.0, 1.1)), runs((0.5, 2.0)))
    assert "the split's own runs differ by 1.5, and the model's by 0.1 at most" in str(wide)
    same = (float("nan"), float("inf"))
    odd = [[torch.tensor([*same, 1.0 + i])] for i in range(3)]
    assert beyond_spread(odd, [[torch.tensor([*same, 2.0])]]) is None
    assert beyond_spread(odd, [[torch.tensor([1.0, float("inf"), 2.0])]])
    assert beyond_spread(odd, [[torch.tensor([same[0], 1.0, 2.0])]])


class SeldomNoisy(Noisy):
    """Noise in one element of some runs: in none of the four by which the spread is judged at first, but in the split's beside."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found = grad.clone()
        found.view(-1)[0] *= 1 + 1e-3 * (next(RUNS) in (2, 5, 7, 8, 13, 16, 17))
        return found


def test_more_runs_tell_what_is_steady_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RUNS", itertools.count(1))
    with pytest.warns(UserWarning, match=r"own gradients differ from run to run .* equal where both repeat"):
        prepare_split(Net(SeldomNoisy), (torch.randn(2, 4),), split=SplitSpec("after:a", trainable=True))
    assert next(RUNS) == 18, "as many as show that the model, too, is noisy there"
