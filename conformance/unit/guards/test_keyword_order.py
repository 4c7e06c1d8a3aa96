"""Keyword inputs come in an order, and forward meets those of `**kwargs` in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import prepare_split
from ariadne.errors import InputError
from conformance.unit.trap_kit import numbers

P, Q = numbers(2, 4), numbers(2, 4) + 1.0
SAID = (
    r"in the order in which they come \(\*\*kwargs\): expected p, q; found q, p. Pass them as example_kwargs had them"
)


class Walks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, **features: Tensor) -> Tensor:
        return self.b(self.a(torch.cat(list(features.values()), 1)).relu())


class HandsOn(Walks):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Walks()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs)


class Named(Walks):
    def forward(self, p: Tensor, q: Tensor, **rest: Any) -> Tensor:
        return super().forward(p=p, q=q)


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return outer


class Wrapped(Named):
    forward = _wrapped(Named.forward)


def split(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return prepare_split(kind(), (), example_kwargs={"p": P, "q": Q}, split="percent:50")


@torch.no_grad()
@pytest.mark.parametrize("kind", [HandsOn, Walks])
def test_what_walks_through_them_takes_them_in_the_order_of_the_example(kind: type[nn.Module]) -> None:
    runtime = split(kind)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(p=P, q=Q)), runtime.model(p=P, q=Q))
    with pytest.raises(InputError, match=SAID):
        runtime.run_prefix(q=Q, p=P)
    with torch.enable_grad(), pytest.raises(InputError, match=SAID):
        runtime.run_training_prefix(q=Q, p=P)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Named, Wrapped])
def test_where_they_have_names_any_order_serves(kind: type[nn.Module]) -> None:
    runtime = split(kind)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(q=Q, p=P)), runtime.model(p=P, q=Q))


@torch.no_grad()
def test_a_hook_that_is_given_them_may_walk_through_them() -> None:
    torch.manual_seed(0)
    net = Named()
    net.register_forward_pre_hook(lambda m, args, kwargs: (tuple(kwargs.values()), {}), with_kwargs=True)
    runtime = prepare_split(net, (), example_kwargs={"p": P, "q": Q}, split="percent:50")
    assert not torch.equal(net(p=P, q=Q), copy.deepcopy(net)(q=Q, p=P))
    with pytest.raises(InputError, match=SAID):
        runtime.run_prefix(q=Q, p=P)


@torch.no_grad()
def test_a_half_knows_it_too(tmp_path: Path) -> None:
    runtime = split(Walks)
    runtime.save(tmp_path / "prefix", side="prefix")
    half = ariadne.load(tmp_path / "prefix")
    assert torch.equal(runtime.run_suffix(half.run_prefix(p=P, q=Q)), runtime.model(p=P, q=Q))
    with pytest.raises(InputError, match=SAID):
        half.run_prefix(q=Q, p=P)
