"""Deep copies of a split: what its plan calls whole is the copy's, and the original is not touched."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ariadne
from ariadne import SplitRuntime, SplitSpec
from ariadne.capture.copied import _held_by
from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split


@ariadne.opaque
class Counting(nn.Module):
    """Counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.inner(x) * self.calls


class Base(nn.Module):
    """What each of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.part, self.block = Counting(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.table, self.draws = torch.ones(4), torch.Generator()
        self.register_buffer("calls", torch.zeros(()))
        self.act = lambda h: self.block(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Module(Base):
    def inner(self, x: Tensor) -> Tensor:
        return self.part(x)


class Method(Base):
    @ariadne.opaque
    def counted(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.block(x) * self.calls

    def inner(self, x: Tensor) -> Tensor:
        return self.counted(x)


class Again(Base):
    """A checkpoint is kept whole: of a module, of a method, of `functools.partial`, of functions that hold the model."""

    how = "module"

    def inner(self, x: Tensor) -> Tensor:
        def closed(h: Tensor) -> Tensor:
            self.calls.add_(1)
            return torch.tanh(self.block(h))

        def by_default(h: Tensor, model: Any = self) -> Tensor:
            return model.block(h) * 2

        box = {"model": self}
        ways = {
            "module": self.block,
            "method": self.twice,
            "partial": partial(self.block.__call__),
            "closure": closed,
            "default": by_default,
            "box": lambda h: box["model"].block(h),
            "held": self.act,
        }
        return checkpoint(ways[self.how], x, use_reentrant=True)

    def twice(self, h: Tensor) -> Tensor:
        return self.block(h) * 2


class Scaled(torch.autograd.Function):
    """Reads a table of the model that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x * model.table

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.model.table, None


class Handed(Base):
    def inner(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self)


class Drawing(Base):
    def inner(self, x: Tensor) -> Tensor:
        return x * torch.rand(4, generator=self.draws)


def made(kind: str) -> Base:
    torch.manual_seed(0)
    model = {"opaque module": Module, "opaque method": Method, "handed": Handed, "generator": Drawing}.get(
        kind, Again
    )()
    if isinstance(model, Again):
        model.how = kind
    return model.train()


def prepared(model: Base) -> SplitRuntime:
    spec = SplitSpec(boundary="percent:50", dynamic_batch=(1, 4), trainable=True)
    return prepare_split(model, (torch.ones(2, 4),), split=spec)


def trained(runtime: SplitRuntime, x: Tensor) -> Tensor:
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, targets=None: out.square().sum())
    runtime.backward_prefix(boundary, gradients)
    return loss


def state(model: Base) -> list[Tensor | None]:
    numbers: list[Tensor | None] = [model.table, model.draws.get_state()]
    return [*numbers, *model.state_dict().values(), *(p.grad for p in model.parameters())]


def same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        (a is None) is (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(some, others, strict=True)
    )


KINDS = ["closure", "default", "generator", "handed", "method", "module", "opaque method", "opaque module", "partial"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_with_its_own_state_alone(kind: str) -> None:
    original = made(kind)
    runtime = prepared(original)
    whole, split = copy.deepcopy(original), copy.deepcopy(runtime)
    for model in (whole, split.model):
        with torch.no_grad():
            for t in (*model.parameters(), model.table):
                t.mul_(1.5)
    before = copy.deepcopy(state(original))
    x = torch.randn(3, 4)
    for _ in range(2):
        loss = whole(x).square().sum()
        loss.backward()
        assert torch.equal(loss, trained(split, x))
    assert same(state(whole), state(split.model))
    assert same(state(original), before), "the copy ran in the original"


def test_what_reaches_the_model_in_a_hidden_way_is_not_copied() -> None:
    runtime = prepared(made("box"))
    with pytest.raises(ModuleError, match=r"reaches the model.*Prepare the copy of the model"):
        copy.deepcopy(runtime)


def test_what_an_objects_dict_holds_is_found_from_the_dict() -> None:
    held: Any = Drawing()
    held.kept = [1]
    assert any(found is held.kept for found in _held_by(vars(held)))


def test_a_copy_shares_the_plan_where_nothing_in_it_belongs_to_the_model() -> None:
    runtime = prepare_split(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),), split="percent:50")
    assert copy.deepcopy(runtime).plan is runtime.plan


def test_a_function_that_stands_on_the_model_is_shared_as_the_copied_model_shares_it() -> None:
    runtime = prepared(made("held"))
    split = copy.deepcopy(runtime)
    with torch.no_grad():
        for p in split.model.parameters():
            p.mul_(1.5)
        x = torch.randn(3, 4)
        assert torch.equal(split.run_suffix(split.run_prefix(x)), split.model(x))
