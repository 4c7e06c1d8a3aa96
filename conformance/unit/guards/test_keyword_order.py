"""Keyword inputs come in an order, and forward meets those of `**kwargs` in it; so with the keys of a dict. Each has a plan."""

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
def test_what_walks_through_them_gets_a_plan_for_each_order(kind: type[nn.Module]) -> None:
    runtime = split(kind)
    for _ in range(2):
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(p=P, q=Q)), runtime.model(p=P, q=Q))
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(q=Q, p=P)), runtime.model(q=Q, p=P))
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(q=Q[:1], p=P[:1])), runtime.model(q=Q[:1], p=P[:1]))
    assert not torch.equal(runtime.model(p=P, q=Q), runtime.model(q=Q, p=P))
    assert len({plan.assumption.order for plan in runtime.plans}) == 2


def test_training_takes_them_in_each_order() -> None:
    runtime = split(Walks)
    model = copy.deepcopy(runtime.model)
    for step in range(2):
        given = {"q": Q, "p": P} if step else {"p": P, "q": Q}
        model(**given).sum().backward()
        boundary = runtime.run_training_prefix(**given)
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda output, targets: output.sum())
        runtime.backward_prefix(boundary, gradients)
        for mine, whole in zip(runtime.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.grad, whole.grad)


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
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(q=Q, p=P)), net(q=Q, p=P))


@torch.no_grad()
def test_a_half_knows_it_too(tmp_path: Path) -> None:
    runtime = split(Walks)
    runtime.save(tmp_path / "prefix", side="prefix")
    half = ariadne.load(tmp_path / "prefix")
    assert torch.equal(runtime.run_suffix(half.run_prefix(p=P, q=Q)), runtime.model(p=P, q=Q))
    with pytest.raises(InputError, match=SAID):
        half.run_prefix(q=Q, p=P)


class Takes(nn.Module):
    """Reads two keys of a dict, and a third that need not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, given: dict[str, Any]) -> Tensor:
        h = self.a(given["x"]) * given["scale"]
        return self.b(h * given["mask"] if "mask" in given else h.relu())


SCALE, MASK = torch.tensor([2.0, 3.0, 4.0, 5.0]), torch.rand(2, 4)
OTHERS: dict[str, dict[str, Any]] = {
    "in another order": {"scale": SCALE, "x": P},
    "with a key that is not read": {"x": P, "scale": SCALE, "path": "a.png"},
    "with a tensor that is not read, in front": {"labels": torch.ones(2), "x": P, "scale": SCALE},
    "with a key that is read": {"mask": MASK, "x": P, "scale": SCALE},
}


@torch.no_grad()
@pytest.mark.parametrize("others", sorted(OTHERS))
def test_a_dict_with_other_keys_gets_a_plan(others: str) -> None:
    net = Takes()
    runtime = prepare_split(net, ({"x": P, "scale": SCALE},), split="after:a")
    for batch in (2, 1, 5):
        given = {
            k: v.repeat(3, *[1] * (v.dim() - 1))[:batch] if torch.is_tensor(v) and len(v) == 2 else v
            for k, v in OTHERS[others].items()
        }
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(given)), net(given))
    assert len(runtime.plans) == 2


def test_what_a_dict_lacks_is_the_models_own_error() -> None:
    runtime = prepare_split(Takes(), ({"x": P, "scale": SCALE},), split="after:a")
    with pytest.raises(KeyError, match="scale"):
        runtime.run_prefix({"x": P})


def test_a_half_takes_the_keys_that_it_was_saved_with(tmp_path: Path) -> None:
    runtime = prepare_split(Takes(), ({"x": P, "scale": SCALE},), split="after:a")
    runtime.save(tmp_path / "prefix", side="prefix")
    with pytest.raises(InputError, match="another structure than at capture"):
        ariadne.load(tmp_path / "prefix").run_prefix(OTHERS["in another order"])
