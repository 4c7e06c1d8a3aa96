"""Leaves of autograd's that forward makes: parameters, and what it tells to require grad; and what it may not tell so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import InputError, UnsupportedError
from conformance.unit.trap_kit import Fn, Twins, loss_of, numbers

Forward = Callable[[Any, Tensor], Any]
RETURNED: dict[str, Forward] = {
    "a parameter": lambda s, x: nn.Parameter(s.b(s.a(x)).detach()),
    "a frozen one": lambda s, x: (s.b(s.a(x)), nn.Parameter(s.a(x).detach(), requires_grad=False)),
    "in a dict": lambda s, x: {"out": s.b(s.a(x)), "p": nn.Parameter(s.a(x).tanh().detach())},
    "told": lambda s, x: (s.b(s.a(x)), s.a(x).detach().requires_grad_()),
    "crossing": lambda s, x: s.b(nn.Parameter(s.a(x).detach()) * 2),
}


def test_views_of_an_input_under_no_grad_are_no_leaves_that_forward_makes() -> None:
    model = made(lambda s, x: (x.chunk(2, -1)[0], s.b(s.a(x))))
    runtime = prepare_split(model, (numbers(2, 6).requires_grad_(),), split="after:a")
    for wants in (True, False):
        x = numbers(3, 6).requires_grad_(wants)
        for grad in (torch.no_grad, torch.inference_mode):
            with grad():
                found, expected = runtime.run_suffix(runtime.run_prefix(x)), model(x)
            assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]


def made(forward: Forward) -> nn.Module:
    return Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6))


def kinds(value: Any) -> list[tuple[type, bool, bool]]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return [(type(t), t.requires_grad, t.is_leaf) for t in found]


@pytest.mark.parametrize("name", RETURNED)
def test_a_leaf_that_forward_makes_comes_back_as_one(name: str) -> None:
    twins = Twins(lambda: made(RETURNED[name]), numbers(2, 6))
    for runtime in twins.cuts():
        for batch in (2, 3):
            x, seen = numbers(batch, 6), []
            with torch.no_grad():
                assert kinds(twins.whole(x)) == kinds(runtime.run_suffix(runtime.run_prefix(x)))
            boundary = runtime.run_training_prefix(x)
            runtime.train_suffix(boundary, loss_fn=lambda o, _, seen=seen: (seen.append(kinds(o)), loss_of(o))[1])
            assert seen == [kinds(twins.whole(x))]
            twins.split.zero_grad()


def test_a_leaf_that_is_computed_with_or_kept_is_refused_by_name() -> None:
    def used(s: Any, x: Tensor) -> Any:
        p = nn.Parameter(s.a(x).detach())
        return p, s.b(p)

    def kept(s: Any, x: Tensor) -> Any:
        s.last = s.a(x).detach().requires_grad_()
        return s.b(s.a(x))

    for forward, words in (
        (used, "returns a Parameter that it makes itself, and computes"),
        (kept, "in attribute 'last'"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            prepare_split(made(forward), (numbers(2, 6),), split="50%")


@pytest.mark.parametrize("given", [False, True])
def test_an_input_is_not_told_that_it_requires_grad(given: bool) -> None:
    def assigned(s: Any, x: Tensor) -> Any:
        x.requires_grad = True
        return s.b(s.a(x)), x * 2

    for forward in (lambda s, x: s.b(s.a(x.requires_grad_())), assigned):
        with pytest.raises(
            UnsupportedError, match=r"sets requires_grad of an input in .* x.detach\(\).requires_grad_\(\)"
        ):
            prepare_split(made(forward), (numbers(2, 6).requires_grad_(given),), split="50%")


def test_a_weight_is_not_frozen_in_forward() -> None:
    with pytest.raises(UnsupportedError, match="sets requires_grad of a tensor of the model"):
        prepare_split(
            made(lambda s, x: (s.a.weight.requires_grad_(False), s.b(s.a(x)))[1]), (numbers(2, 6),), split="50%"
        )


def test_a_forward_without_inputs_is_told_what_it_lacks() -> None:
    class Alone(nn.Linear):
        def forward(self) -> Tensor:  # type: ignore[override]
            return super().forward(torch.ones(2, 4)).tanh()

    with pytest.raises(InputError, match="hold no tensor, and a split begins with the tensors that forward is given"):
        prepare_split(Alone(4, 4), (), split=SplitSpec("50%", batch_dim="none"))
