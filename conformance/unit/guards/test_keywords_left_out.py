"""A keyword that the example left out may be passed, and one that it passed may be left out: each gets a plan of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.errors import InputError
from conformance.unit.trap_kit import numbers, same

X, MASK = numbers(2, 4), numbers(2, 4, seed=1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        h = self.a(x).relu()
        h = h if mask is None else h * mask
        y: torch.Tensor = self.b(h) + sum(more.values())
        return y


class Plain(Masked):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, mask)


CALLS: list[dict[str, Any]] = [{}, {"mask": MASK}, {"mask": None}, {"mask": MASK, "bias": numbers(4)}]


@pytest.mark.parametrize(("example", "call"), [(0, 1), (1, 0), (1, 2), (2, 1), (0, 3), (3, 0)])
def test_each_call_is_served(example: int, call: int) -> None:
    model = Masked()
    runtime = prepare_split(model, (X,), example_kwargs=CALLS[example], split="after:a")
    for kwargs in (CALLS[call], CALLS[example]):
        same(model(X, **kwargs), runtime.run_suffix(runtime.run_prefix(X, **kwargs)))


def test_another_batch_is_served_by_the_same_plan() -> None:
    model = Plain()
    runtime = prepare_split(model, (X,), split="after:a")
    for batch in (2, 5, 3):
        x, mask = numbers(batch, 4), numbers(batch, 4, seed=2)
        same(model(x, mask=mask), runtime.run_suffix(runtime.run_prefix(x, mask=mask)))
        same(model(x, mask), runtime.run_suffix(runtime.run_prefix(x, mask)))
        same(model(x, mask=None), runtime.run_suffix(runtime.run_prefix(x, mask=None)))
    assert len(runtime.plans) == 2


def test_what_forward_has_no_keyword_for_is_refused() -> None:
    runtime = prepare_split(Plain(), (X,), split="after:a")
    with pytest.raises(InputError, match=r"another structure than at capture.*had them, or prepare again"):
        runtime.run_prefix(X, msk=MASK)


def test_where_the_form_may_count_it_has_a_plan_in_that_form() -> None:
    model = Plain()
    model.register_forward_pre_hook(lambda module, args: (args[0] * len(args), *args[1:]))
    runtime = prepare_split(model, (X,), split="after:a")
    same(model(X, MASK), runtime.run_suffix(runtime.run_prefix(X, MASK)))
    same(model(X, mask=MASK), runtime.run_suffix(runtime.run_prefix(X, mask=MASK)))
    assert len(runtime.plans) == 3


@dataclass
class Given:
    x: torch.Tensor
    mask: torch.Tensor | None = None


class OfFields(Plain):
    def forward(self, given: Given) -> torch.Tensor:  # type: ignore[override]
        return super().forward(given.x, given.mask)


FORMS: dict[str, tuple[type[Masked], list[tuple[Any, ...]]]] = {
    "by position": (Plain, [(X, MASK), (X,), (X, None)]),
    "in a dataclass": (OfFields, [(Given(X, MASK),), (Given(X),)]),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("form", sorted(FORMS))
def test_none_may_come_where_it_is_the_default(form: str, first: int) -> None:
    kind, calls = FORMS[form]
    model = kind()
    runtime = prepare_split(model, calls[first], split="after:a")
    for args in (*calls, *reversed(calls)):
        same(model(*args), runtime.run_suffix(runtime.run_prefix(*args)))
    assert len(runtime.plans) == 2


class First(Plain):
    def forward(self, mask: torch.Tensor | None = None, x: torch.Tensor = X) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, mask)


@pytest.mark.parametrize("training", [False, True])
def test_none_may_come_first_where_the_batch_was_read(training: bool) -> None:
    model = First()
    runtime = prepare_split(model, (MASK, X), split="after:a")
    for args in ((None, X), (MASK, X), (None, X[:1])):
        if training:
            boundary = runtime.run_training_prefix(*args)
            output, _ = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.sum())
            same(model(*args).sum(), output)
        else:
            same(model(*args), runtime.run_suffix(runtime.run_prefix(*args)))


def test_none_where_forward_needs_a_tensor_is_refused() -> None:
    runtime = prepare_split(Plain(), (X, MASK), split="after:a")
    with pytest.raises(InputError, match="must be a tensor"):
        runtime.run_prefix(None, MASK)
