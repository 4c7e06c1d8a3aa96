"""A tensor that forward reaches by a second reference, too: where the registry gets another one, the split goes on as the model."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne import SplitSpec
from ariadne.errors import ModuleError
from ariadne.guards import calls
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

X = numbers(3, 4)
OUTSIDE: dict[str, Any] = {}


class Net(nn.Module):
    """In the middle it uses `b.weight` or the buffer `mask`, by whatever reference `keep` has made."""

    def __init__(self, keep: Callable[[Any], Callable[[Any, torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mask", torch.ones(8))
        self.uses = keep(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(self.uses(self, self.a(x))) * self.mask))


def closure(s: Any) -> Any:
    w = s.b.weight
    return lambda _, h: F.linear(h, w)


def default(s: Any) -> Any:
    return lambda _, h, w=s.b.weight: F.linear(h, w)


def in_a_list(s: Any) -> Any:
    s.weights = [s.b.weight]
    return lambda s, h: F.linear(h, s.weights[0])


def in_a_list_around(s: Any) -> Any:
    weights = [s.b.weight]
    return lambda _, h: F.linear(h, weights[0])


def in_a_dict_around(s: Any) -> Any:
    weights = {"b": (s.b.weight, 1)}
    return lambda _, h: F.linear(h, weights["b"][0])


def attribute(s: Any) -> Any:
    object.__setattr__(s, "weight", s.b.weight)
    return lambda s, h: F.linear(h, s.weight)


def by_partial(s: Any) -> Any:
    s.linear = functools.partial(F.linear, weight=s.b.weight)
    return lambda s, h: s.linear(h)


def partial_around(s: Any) -> Any:
    linear = functools.partial(F.linear, weight=s.b.weight)
    return lambda _, h: linear(h)


def on_an_object(s: Any) -> Any:
    s.kept = types.SimpleNamespace(weight=s.b.weight)
    return lambda s, h: F.linear(h, s.kept.weight)


def on_an_object_around(s: Any) -> Any:
    kept = types.SimpleNamespace(weight=s.b.weight)
    return lambda _, h: F.linear(h, kept.weight)


def a_global(s: Any) -> Any:
    OUTSIDE["weight"] = s.b.weight
    return lambda _, h: F.linear(h, OUTSIDE["weight"])


def a_view_around(s: Any) -> Any:
    w = s.b.weight.detach()
    return lambda _, h: F.linear(h, w)


def buffer_around(s: Any) -> Any:
    mask = s.mask
    return lambda _, h: h * mask


def buffer_in_a_list(s: Any) -> Any:
    s.masks = [s.mask]
    return lambda s, h: h * s.masks[0]


def two_attributes(s: Any) -> Any:
    s.one = s.two = torch.ones(8)
    return lambda s, h: h * s.one * s.two


KEEPS = [closure, in_a_list, by_partial, a_global, buffer_around]
MORE = [default, in_a_list_around, in_a_dict_around, attribute, partial_around, on_an_object, on_an_object_around]
MORE += [a_view_around, buffer_in_a_list, two_attributes]


def all_anew(m: Any) -> None:
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)
    m.two = torch.full((8,), 2.0)


def nothing(m: Any) -> None:
    m.zero_grad()


@pytest.mark.parametrize(
    "keep", [*KEEPS, *(pytest.param(k, marks=pytest.mark.variants) for k in MORE)], ids=lambda f: f.__name__
)
def test_the_split_takes_the_tensor_that_the_model_takes(keep: Any) -> None:
    model = Net(keep)
    runtime = prepare_split(model, (X,), split=SplitSpec("after:a", trainable=True))
    plans = len(runtime.plans)
    for change in (nothing, all_anew):
        change(model)
        with torch.no_grad():
            same(model(X), runtime.run_suffix(runtime.run_prefix(X)), change.__name__)
        model.zero_grad()
        boundary = runtime.run_training_prefix(X)
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().sum())
        runtime.backward_prefix(boundary, gradients)
        mine = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(X).square().sum().backward()
        same([p.grad for p in model.parameters()], mine, f"gradients, {change.__name__}")
        assert change is all_anew or len(runtime.plans) == plans


def test_a_copy_whose_function_keeps_the_weight_of_the_original_is_followed() -> None:
    runtime = copy.deepcopy(prepare_split(Net(closure), (X,), split="after:a"))
    with torch.no_grad():
        runtime.model.b.weight.mul_(2)  # the function has that of the model that was copied
        same(runtime.model(X), runtime.run_suffix(runtime.run_prefix(X)), "the copy")


def test_a_suffix_that_misses_its_reference_says_so() -> None:
    model = Net(closure)
    runtime = prepare_split(model, (X,), split="after:a")
    boundary = runtime.run_prefix(X)
    model.b.weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ModuleError, match=r"'b.weight' was what forward reached by the variable 'w' around .*, too"):
        runtime.run_suffix(boundary)


def test_a_list_that_forward_never_reads_is_no_reference() -> None:
    model = Net(lambda s: lambda s, h: h)
    model.trained = list(model.parameters())
    runtime = prepare_split(model, (X,), split="after:a")
    plans = len(runtime.plans)
    model.b.weight = nn.Parameter(torch.ones(8, 8))
    with torch.no_grad():
        same(model(X), runtime.run_suffix(runtime.run_prefix(X)), "another weight")
    assert len(runtime.plans) == plans


@pytest.mark.planted
@pytest.mark.parametrize("keep", [closure, in_a_list], ids=lambda f: f.__name__)
def test_without_the_references_the_split_takes_another_weight(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "referred", lambda *_: [])
    model = Net(keep)
    runtime = prepare_split(model, (X,), split="after:b")
    all_anew(model)
    with torch.no_grad():
        assert not torch.equal(model(X), runtime.run_suffix(runtime.run_prefix(X)))
