"""Parts that train in ways of their own: reentrant checkpoints, sparse gradients; prepared with `trainable=True`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from conformance.unit.trap_kit import Fn, numbers, same

IDS = torch.arange(12).reshape(4, 3) % 5


def reentrant(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(checkpoint(lambda y: torch.tanh(s.a(y)), s.c(x), use_reentrant=True))


def drawing(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(checkpoint(lambda y: F.dropout(s.a(y), 0.5), s.c(x), use_reentrant=True))


def nested(s: Any, x: torch.Tensor) -> torch.Tensor:
    inner = lambda y: checkpoint(s.a, y, use_reentrant=True) * 2  # noqa: E731 -- named as a user would
    return s.b(checkpoint(inner, s.c(x), use_reentrant=True))


def linears() -> dict[str, nn.Module]:
    return {name: nn.Linear(6, 6) for name in "abc"}


def sparse_tied() -> nn.Module:
    model = Fn(lambda s, i: s.b(torch.tanh(s.e(i).mean(1))), e=nn.Embedding(9, 6, sparse=True), b=nn.Linear(6, 9))
    model.b.weight = model.e.weight
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "a reentrant checkpoint": (lambda: Fn(reentrant, **linears()), numbers(4, 6)),
    "one that draws": (lambda: Fn(drawing, **linears()), numbers(4, 6)),
    "one in another": (lambda: Fn(nested, **linears()), numbers(4, 6)),
    "a sparse embedding": (lambda: nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 2)), IDS),
    "a sparse bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), nn.Linear(6, 2)), IDS),
    "two sparse calls": (
        lambda: Fn(lambda s, i: s.b(s.e(i) * s.e(i + 1)), e=nn.Embedding(9, 6, sparse=True), b=nn.Linear(6, 2)),
        IDS,
    ),
    "a sparse and tied one": (sparse_tied, IDS),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_it_is_prepared_as_trainable_and_trains_as_the_whole(name: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    whole = make()
    split = copy.deepcopy(whole)
    held = [torch.ones_like(p) for p in split.parameters()]
    for p, g in zip(split.parameters(), held, strict=True):
        p.grad = g
    runtime = prepare_split(split, (x,), split=SplitSpec("50%", dynamic_batch=(1, 8), trainable=True))
    assert all(p.grad is g for p, g in zip(split.parameters(), held, strict=True))
    split.zero_grad()
    for candidate in [c for c in runtime.candidates if c.safe and not c.inexact]:
        cut = runtime.resplit(candidate)
        for step in range(2):
            torch.manual_seed(step)
            whole(x).pow(2).sum().backward()
            torch.manual_seed(step)
            boundary = cut.run_training_prefix(x)
            _, gradients = cut.train_suffix(boundary, loss_fn=lambda o, _: o.pow(2).sum())
            cut.backward_prefix(boundary, gradients)
            same([p.grad for p in whole.parameters()], [p.grad for p in split.parameters()], cut.split_id)
        whole.zero_grad()
        split.zero_grad()


def test_no_hook_of_a_parameter_runs_while_gradients_are_held_against_the_model_s() -> None:
    model, seen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), []
    model[0].weight.register_hook(seen.append)
    model[1].weight.register_post_accumulate_grad_hook(seen.append)
    prepare_split(model, (numbers(2, 6),), split=SplitSpec("after:0", trainable=True))
    assert not seen
    model(numbers(2, 6)).sum().backward()
    assert len(seen) == 2


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning")
def test_sparse_tensors_are_compared_by_what_they_hold(layout: torch.layout) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    mine = dense.to_sparse(layout=layout)
    assert difference(mine, dense.to_sparse(layout=layout)) is None
    assert "values differ" in str(difference(mine, (dense * 2).to_sparse(layout=layout)))
    assert difference(mine, dense.flip(0).to_sparse(layout=layout)) is not None
    assert "layout" in str(difference(mine, dense))
