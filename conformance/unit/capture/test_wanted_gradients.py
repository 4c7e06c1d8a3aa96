"""Tensors that forward makes and tells that they require a gradient; and what it asks of how a tensor was made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ariadne
from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.errors import UnsupportedError
from conformance.unit.trap_kit import numbers, same

X = numbers(3, 4)


class OldCheckpoint(torch.autograd.Function):
    """As old repositories write one: its parameters get a gradient only where its input wants one."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, x: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.part(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def reentrant(part: nn.Module, h: Tensor) -> Any:
    return checkpoint(part, h, use_reentrant=True)


def old(part: nn.Module, h: Tensor) -> Any:
    return OldCheckpoint.apply(part, h)


def assigned(h: Tensor) -> Tensor:
    h = h.detach()
    h.requires_grad = True
    return h


TOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "requires_grad_": lambda h: h.requires_grad_(),
    "where it does not": lambda h: h if h.requires_grad else h.requires_grad_(True),
    "detached": lambda h: h.detach().requires_grad_(),
    "assigned": assigned,
    "a Variable": lambda h: torch.autograd.Variable(h.data, requires_grad=True),
    "a Parameter": lambda h: nn.Parameter(h.detach()),
    "where it is a leaf": lambda h: h.detach().clone().requires_grad_(h.is_leaf),
}


class Adapted(nn.Module):
    """A stem that is frozen, a body that runs in a checkpoint, a head."""

    def __init__(self, tell: Callable[[Tensor], Tensor], run: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.tell, self.run = tell, run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.body, self.tell(self.stem(x))))  # type: ignore[no-any-return]


def gradients(model: nn.Module, split: SplitRuntime | None = None) -> dict[str, Tensor | None]:
    model.zero_grad()
    if split is None:
        model(X).square().sum().backward()
    else:
        boundary = split.run_training_prefix(X)
        _, back = split.train_suffix(boundary, loss_fn=lambda out, _: out.square().sum())
        split.backward_prefix(boundary, back)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("late", [False, True], ids=["frozen before", "frozen later"])
@pytest.mark.parametrize("run", [old, reentrant], ids=lambda run: run.__name__)
@pytest.mark.parametrize("name", sorted(TOLD))
def test_a_part_after_a_frozen_one_gets_the_models_gradients(name: str, run: Any, late: bool) -> None:
    model = Adapted(TOLD[name], run)
    model.stem.requires_grad_(late)
    split = prepare_split(model, (X[:2],), split=SplitSpec("after:stem", dynamic_batch=(1, 8)))
    model.stem.requires_grad_(False)
    whole = gradients(copy.deepcopy(model))
    assert whole["body.0.weight"] is not None
    same(whole, gradients(model, split))


def test_a_hook_that_tells_the_embeddings_is_followed_at_each_cut() -> None:
    model = Adapted(lambda h: h, reentrant)
    model.stem.register_forward_hook(lambda module, given, out: out.requires_grad_(True))
    model.stem.requires_grad_(False)
    whole = gradients(copy.deepcopy(model))
    first = prepare_split(model, (X[:2],), split=SplitSpec("after:stem", dynamic_batch=(1, 8)))
    for cut in [c for c in first.candidates if c.safe]:
        same(whole, gradients(model, first.resplit(cut)))
    with torch.no_grad():
        same(model(X), first.run_suffix(first.run_prefix(X)))


@pytest.mark.parametrize("name", ["assigned", "detached", "where it does not"])
def test_halves_from_files_compute_the_same(name: str, tmp_path: Path) -> None:
    model = Adapted(TOLD[name], lambda part, h: part(h))
    split = prepare_split(model, (X[:2],), split=SplitSpec("after:stem", dynamic_batch=(1, 8)))
    for side in ("prefix", "suffix"):
        split.save(tmp_path / side, side=side)
    with torch.no_grad():
        boundary = ariadne.load(tmp_path / "prefix").run_prefix(X)
        same(model(X), ariadne.load(tmp_path / "suffix").run_suffix(boundary))


class Asking(nn.Module):
    """It goes one way or the other by what it asks of an activation, or of its input."""

    def __init__(self, ask: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.ask = nn.Linear(4, 4), nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h.relu() if self.ask(h, x) else h.tanh())  # type: ignore[no-any-return]


HISTORY: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "is_leaf": lambda h, x: h.is_leaf,
    "grad_fn": lambda h, x: h.grad_fn is None,
    "text": lambda h, x: "grad_fn" in str(h),
}


@pytest.mark.parametrize("name", sorted(HISTORY))
def test_what_made_an_activation_follows_what_is_frozen(name: str) -> None:
    model = Asking(HISTORY[name])
    split = prepare_split(model, (X[:2],), split=SplitSpec("after:first", dynamic_batch=(1, 8)))
    before = gradients(copy.deepcopy(model))
    same(before, gradients(model, split))
    model.first.requires_grad_(False)
    whole = gradients(copy.deepcopy(model))
    assert not torch.equal(whole["last.weight"], before["last.weight"])  # type: ignore[arg-type]
    same(whole, gradients(model, split))


def test_text_of_a_weight_is_no_question_of_what_made_it() -> None:
    model = Asking(lambda h, x: len(str(model.last.weight)) > 5)
    split = prepare_split(model, (X[:2],), split=SplitSpec("after:first", dynamic_batch=(1, 8)))
    same(gradients(copy.deepcopy(model)), gradients(model, split))


def test_what_made_an_input_is_refused() -> None:
    for ask in (lambda h, x: x.grad_fn is None, lambda h, x: "grad_fn" in str(x)):
        with pytest.raises(UnsupportedError, match="asks 'grad_fn' of an input"):
            prepare_split(Asking(ask), (X[:2].clone().requires_grad_(),), split="percent:50", fallback="refuse")


def test_an_old_tensor_type_asks_for_a_dtype() -> None:
    model = Asking(lambda h, x: isinstance(h, torch.FloatTensor)).eval()
    split = prepare_split(model, (X[:2],), split=SplitSpec("after:first", dynamic_batch=(1, 8)))
    with torch.autocast("cpu", torch.bfloat16):
        same(model(X), split.run_suffix(split.run_prefix(X)))


class Mine(Tensor):
    """A class of the user's own."""


class Storing(nn.Module):
    """It puts such a tensor into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.last(x).detach().as_subclass(Mine).sum()
        return self.last(x).relu()  # type: ignore[no-any-return]


def test_a_tensor_of_a_class_in_a_buffer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a tensor of class Mine in buffer 'seen'"):
        prepare_split(Storing(), (X[:2],), split="percent:50", fallback="refuse")
