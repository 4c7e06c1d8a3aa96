"""What forward asks of a tensor's past is refused by name; expanded inputs and parameters as inputs are taken as they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError
from conformance.unit.trap_kit import Fn, numbers

ASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "is_leaf": lambda t: t.is_leaf,
    "grad": lambda t: t.grad is None,
    "_version": lambda t: t._version,
    "_base": lambda t: t._base is None,
    "_is_view": lambda t: t._is_view(),
    "is_inference": lambda t: t.is_inference(),
    "is_conj": lambda t: t.is_conj(),
    "is_neg": lambda t: t.is_neg(),
    "is_shared": lambda t: t.is_shared(),
}


def asking(ask: Callable[[torch.Tensor], Any], of: str) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x).relu()
        asked = {"an input": x, "a parameter": m.b.weight, "what an op made": h}[of]
        return m.b(h) * (2.0 if ask(asked) else 1.0)

    torch.manual_seed(0)
    return Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()


@pytest.mark.parametrize("of", ["an input", "a parameter"])
@pytest.mark.parametrize("name", ASKS)
def test_a_question_about_the_past_of_a_tensor_is_refused_by_name(name: str, of: str) -> None:
    with pytest.raises(UnsupportedError, match=f"forward asks '{name}' of an input, or of a tensor of the model"):
        prepare_split(asking(ASKS[name], of), (numbers(2, 4),), split="50%")


@pytest.mark.parametrize("name", ["_base", "_is_view", "is_conj", "is_neg"])
def test_of_what_an_op_made_it_is_followed(name: str) -> None:
    model = asking(ASKS[name], "what an op made")
    runtime = prepare_split(model, (numbers(2, 4),), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    for batch in (1, 2, 5):
        x = numbers(batch, 4, seed=batch)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


@pytest.mark.parametrize("dims", [(1, 4), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_an_expanded_input_is_taken(dims: tuple[int, int], dtype: torch.dtype) -> None:
    model = Fn(lambda m, x: m.b(m.a(x.float()).relu()), a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    x = (10 * numbers(*dims)).to(dtype).expand(2, 4)
    runtime = prepare_split(model, (x,), split="50%")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


@pytest.mark.parametrize(
    "ask",
    [lambda x: type(x) is torch.Tensor, lambda x: isinstance(x, nn.Parameter), lambda x: x.__class__ is nn.Parameter],
)
def test_an_input_that_is_a_parameter_stays_one_where_the_model_is_run_on_it(ask: Callable[[Any], bool]) -> None:
    model = asking(ask, "an input")
    x = nn.Parameter(numbers(2, 4))
    runtime = prepare_split(model, (x,), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    for given in (x, nn.Parameter(numbers(3, 4))):
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(given)), model(given))


MOVING: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(2),
    "numpy's default_rng": lambda: np.random.default_rng(3),
    "numpy's RandomState": lambda: np.random.RandomState(3),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([0] * 9 + [1]),
    "a generator": lambda: iter([0] * 100),
}


@pytest.mark.parametrize("kind", MOVING)
def test_what_moves_on_at_each_call_is_refused_though_its_effect_is_rare(kind: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        drawn = next(m.own) if hasattr(m.own, "__next__") else m.own.random()
        return m.b(m.a(x).relu()) * (2.0 if drawn == 0.123 else 1.0)

    with pytest.raises(UnsupportedError, match=r"forward reads (the attribute 'own' of the model|Fn\.own), an? "):
        prepare_split(
            Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), own=MOVING[kind]()), (numbers(2, 4),), split="50%"
        )
