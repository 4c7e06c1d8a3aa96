"""What `functools.cache` had kept before forward asked again: its function's code did not run, so nothing else shows a change."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ariadne import prepare_split
from ariadne.errors import UnsupportedError
from ariadne.guards.remembered import Remembered
from conformance.unit.guards.test_first_calls import Net, X, call

FACTOR = {"is": 2.0}


@functools.cache
def factor(of: Any) -> float:
    return FACTOR["is"]


@functools.lru_cache(maxsize=2)
def tensor(of: Any, *, times: int) -> torch.Tensor:
    return torch.ones(4) * FACTOR["is"] * times


ASKS: dict[str, Callable[[Any], Any]] = {"a number": lambda m: factor("x"), "a tensor": lambda m: tensor(m, times=3)}


def split_of(asks: Callable[[Any], Any]) -> Any:
    FACTOR["is"] = 2.0
    factor.cache_clear()
    tensor.cache_clear()
    model = Net(asks)
    model(X)  # the functions keep their results from here on
    return prepare_split(model, (X,), split="after:first")


@torch.no_grad()
@pytest.mark.parametrize("name", ASKS)
def test_what_a_function_had_kept_is_followed_until_it_is_forgotten(name: str) -> None:
    split = split_of(ASKS[name])
    FACTOR["is"] = 3.0
    assert torch.equal(call(split), split.model(X)), "the function keeps what it had"
    factor.cache_clear()
    tensor.cache_clear()
    assert torch.equal(call(split), split.model(X))
    assert torch.equal(call(split), call(split))


@torch.no_grad()
def test_a_result_that_made_way_for_others_is_asked_for_anew() -> None:
    split = split_of(ASKS["a tensor"])
    tensor(1, times=1)
    before = len(split.plans)
    assert torch.equal(call(split), split.model(X))
    assert len(split.plans) == before, "another result beside it changes nothing"
    tensor(2, times=1)
    tensor(3, times=1)
    FACTOR["is"] = 3.0
    assert torch.equal(call(split), split.model(X))


@functools.lru_cache(maxsize=1)
def table(rows: int) -> torch.Tensor:
    return torch.arange(float(rows))[:, None] / rows


@torch.no_grad()
def test_a_result_that_capture_itself_pushes_out_is_refused_by_name() -> None:
    model = Net(lambda m: 1.0)
    model.register_forward_pre_hook(lambda m, given: given[0] * table(len(given[0])))
    model(X)
    with pytest.raises(
        UnsupportedError, match=r"'table' had kept, which keeps 1 .*maxsize=128, or call table.cache_clear"
    ):
        prepare_split(model, (X,), split="after:first")
    table.cache_clear()
    split = prepare_split(model, (X,), split="after:first")
    for rows in (X, X[:1], X):
        assert torch.equal(split.run_suffix(split.run_prefix(rows)), model(rows))
        table.cache_clear()


@torch.no_grad()
def test_a_copy_of_the_model_asks_for_itself() -> None:
    split = split_of(ASKS["a tensor"])
    FACTOR["is"] = 3.0
    copied = copy.deepcopy(split)
    assert torch.equal(call(copied), copied.model(X))


@torch.no_grad()
@pytest.mark.parametrize("name", ASKS)
def test_a_guard_that_takes_results_for_kept_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remembered, "holds", lambda self: True)
    with pytest.raises(AssertionError):
        test_what_a_function_had_kept_is_followed_until_it_is_forgotten(name)


class Entry:
    """One of a registry: a function under a name."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run = run


REGISTRY = {"number": [Entry(lambda m: factor("x"))]}


@torch.no_grad()
def test_a_function_of_a_registry_that_asks_it_is_found() -> None:
    split = split_of(lambda m: REGISTRY["number"][0].run(m))
    FACTOR["is"] = 3.0
    factor.cache_clear()
    assert torch.equal(split.model(X), call(split)), "the model runs first, and the function keeps what it gave"
