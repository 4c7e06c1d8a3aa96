"""A graph of the caller's that made a weight: the proof of a Python split walks into it no more than that of a plan."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import TrainingError, UnsupportedError
from ariadne.stopped.standins import stand_ins


class Net(nn.Module):
    """Draws from `random`, so no plan holds; reads a weight after the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper, self.first, self.last = nn.Linear(3, 16), nn.Linear(4, 4), nn.Linear(4, 2)
        self.made: Any = None

    def weight(self) -> Tensor:
        return self.made

    def hold(self, weight: Tensor) -> None:
        self.made = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(self.first(x), self.weight())) * (1 + random.random())


class InTuple(Net):
    """In a tuple of a list."""

    def weight(self) -> Tensor:
        return self.made[0][1]

    def hold(self, weight: Tensor) -> None:
        self.made = [("weight", weight)]


class OfParameter(Net):
    """At the parameter that it stands for."""

    def weight(self) -> Tensor:
        return self.first.weight.fast

    def hold(self, weight: Tensor) -> None:
        self.first.weight.fast = weight


class Slotted:
    __slots__ = ("weight",)


class InSlot(Net):
    """In a slot of an object, and in a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Slotted()

    def weight(self) -> Tensor:
        return self.made.weight

    def hold(self, weight: Tensor) -> None:
        self.made.weight = weight


class InCell(Net):
    """In a variable of an enclosing function."""

    def hold(self, weight: Tensor) -> None:
        self.weight = lambda: weight


X, Y = torch.arange(12.0).view(3, 4).cos(), torch.arange(6.0).view(3, 2).sin()


def trained(kind: type[Net], own: bool, prepared: bool, fallback: Any) -> list[Tensor | None]:
    torch.manual_seed(0)
    random.seed(0)
    model, source, seen = kind(), nn.Linear(3, 16), list[Tensor]()
    weight = (model.hyper if own else source)(torch.ones(3)).tanh().view(4, 4)
    weight.retain_grad()
    weight.register_hook(lambda g: seen.append(g.clone()))
    model.hold(weight)
    spec = SplitSpec("after:first", trainable=prepared)
    runtime = prepare_split(model, (X,), split=spec, fallback=fallback) if fallback else None
    random.seed(1)
    if runtime is None:
        F.mse_loss(model(X), Y).backward()
    else:
        boundary = runtime.run_training_prefix(X)
        _, gradients = runtime.train_suffix(boundary, Y, loss_fn=F.mse_loss)
        runtime.backward_prefix(boundary, gradients)
    assert model.weight() is weight
    return [*(p.grad for p in (*model.parameters(), *source.parameters())), weight.grad, *seen]


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", [Net, InTuple, OfParameter, InSlot])
def test_a_weight_made_elsewhere_trains_and_its_hooks_run_once(kind: type[Net], own: bool, prepared: bool) -> None:
    whole, split = (trained(kind, own, prepared, by) for by in (None, "python"))
    assert len(whole) == len(split)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(whole, split, strict=True))


class BeforeTheCut(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(F.linear(x, self.weight()))) * (1 + random.random())


class InTupleBefore(BeforeTheCut, InTuple):
    pass


class OfParameterBefore(BeforeTheCut, OfParameter):
    pass


class InCellBefore(BeforeTheCut, InCell):
    pass


class InSlotBefore(BeforeTheCut, InSlot):
    pass


@pytest.mark.parametrize("kind", [BeforeTheCut, InSlotBefore, InTuple])
def test_a_graph_before_the_cut_trains_with_a_weight_made_elsewhere(kind: type[Net]) -> None:
    whole, split = trained(kind, True, True, None), trained(kind, True, True, "python-suffix")
    assert len(whole) == len(split)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(whole, split, strict=True))


@pytest.mark.parametrize("prepared", [True, False])
def test_a_weight_that_nothing_can_stand_in_for_is_refused_and_its_graph_stays(prepared: bool) -> None:
    model = InCell()
    weight = model.hyper(torch.ones(3)).tanh().view(4, 4)
    model.hold(weight)
    spec = SplitSpec("after:first", trainable=prepared)
    with pytest.raises(UnsupportedError, match=r"by \w+Backward0, from where nothing can stand in for it"):
        prepare_split(model, (X,), split=spec, fallback="python").run_training_prefix(X)
    weight.sum().backward()


@pytest.mark.parametrize("kind", [InTupleBefore, OfParameterBefore, InCellBefore])
def test_a_graph_before_the_cut_that_holds_such_a_weight_is_refused(kind: type[Net]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"a tensor that a graph of yours made.*an attribute of a module or a list"
    ):
        trained(kind, True, True, "python-suffix")


def test_a_step_of_another_thread_that_met_a_stand_in_is_told() -> None:
    """Its gradient would be lost without a word."""
    model = Net()
    model.hold(model.hyper(torch.ones(3)).view(4, 4))
    found = list[Tensor]()
    with stand_ins(model):
        thread = threading.Thread(target=lambda: found.append(model(X).sum()))
        thread.start()
        thread.join()
    with pytest.raises(TrainingError, match="in another thread, and its gradient can't reach that graph"):
        found[0].backward()


class Joined(nn.Module):
    """What is made of a parameter outside of forward, which forward reads as well."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.a, self.b, self.g = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.twice, self.made = twice, [self.g.sin()]
        self.made += [self.g * 2] if twice else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random()  # so that no graph holds
        h = self.a(x) * self.made[-1]
        return self.b(h) * self.made[0] if self.twice else self.b(h) * self.g


@pytest.mark.parametrize("twice", [False, True], ids=["read as well", "made twice"])
def test_sums_in_the_callers_graph_with_parts_by_several_ways_are_refused(twice: bool) -> None:
    """Their parts came in another order, since each thread numbers its nodes by itself: a gradient was off by its last bits."""
    with pytest.raises(UnsupportedError, match="added up in another order"):
        prepare_split(
            Joined(twice), (torch.randn(2, 3),), split=SplitSpec("after:a", trainable=True), fallback="python"
        )


class Normed(nn.Module):
    """The old `weight_norm`: what it makes stands in an attribute, and each call puts another there before it is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.a, self.b = nn.Linear(3, 4), nn.utils.weight_norm(nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x).relu())
        random.random()
        return found


@pytest.mark.parametrize("fallback", ["python", "python-suffix"])
def test_what_an_old_weight_norm_left_is_no_weight_made_elsewhere(fallback: Any) -> None:
    whole, split, x = Normed(), Normed(), torch.randn(5, 3)
    one = torch.optim.SGD(whole.parameters(), 0.1)
    runtime: Any = prepare_split(split, (x,), split=SplitSpec("after:a", trainable=True), fallback=fallback)
    front, back = (torch.optim.SGD(p, 0.1) for p in (runtime.prefix_parameters(), runtime.suffix_parameters()))
    for _ in range(3):
        expected = whole(x).square().mean()
        one.zero_grad()
        expected.backward()
        one.step()
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: o.square().mean(), optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        assert torch.equal(loss, expected)
        assert all(map(torch.equal, whole.parameters(), split.parameters()))
