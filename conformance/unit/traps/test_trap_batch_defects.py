"""Defects of batches and layouts that were found and mended: each test failed before."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.capture import Example
from ariadne.compare import difference
from ariadne.errors import (
    BatchError,
)
from ariadne.plan import Batches, Expr, where
from conformance.unit.defects_kit import equal_at, first_six, parts, prepared
from conformance.unit.trap_kit import Fn, numbers


def pieces(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.cat([2 * p for p in m.a(x).chunk(3)]))


def rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.stack(m.a(x).unbind(0)[::-1]))


def given_back(m: Any, x: torch.Tensor) -> Any:
    return m.b(m.a(x)).split(5)


def six_of_a_column(m: Any, x: torch.Tensor) -> torch.Tensor:  # torch skips a slice that reaches to the end
    return m.b(m.a(x) * m.a(x)[:6, 1].sum())


def written_to_six(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)
    kept[:6] = kept[..., 1:2][:6]
    return m.b(kept)


def written_to_six_of_a_column(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)
    kept[:6, 1] = kept[:6, 0]
    return m.b(kept)


def six_overwritten(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)
    kept[:6] = 0.5
    return m.b(kept)


class Six(torch.autograd.Function):
    """What an op of Python makes is not seen by torch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x[:6].clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def six_of_a_function(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = Six.apply(m.a(x))
    return m.b(kept.sum(0) / kept.shape[0])


@torch.jit.script
def pick(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() if x.shape[0] > 6 else x.relu()


def scripted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(pick(m.a(x)))


def parameter_made(m: Any, x: torch.Tensor) -> torch.Tensor:
    p = nn.Parameter(m.a(x), requires_grad=False)
    return m.b(p.tanh() if p.shape[0] > 6 else p.relu())


def number_of_numpys(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    return m.b(y.tanh() if np.int64(6) < x.shape[0] else y.relu())


def write_that_may_fail(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).tanh()
    with suppress(IndexError):
        y[6] = 0.5
    return m.b(y)


def last_six(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)[-6:]
    return m.b(kept.sum(0) / kept.shape[0])


def reads_data(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(m: Any, x: torch.Tensor) -> Any:  # which the symbolic way can't follow
        return x if m.a.weight.sum().item() > 100 else function(m, x)

    return forward


@pytest.mark.parametrize("batch", [2, 6])
@pytest.mark.parametrize("way", [lambda f: f, reads_data], ids=["symbolic", "observed"])
@pytest.mark.parametrize(
    "function",
    [
        parts,
        pieces,
        rows,
        given_back,
        first_six,
        last_six,
        six_of_a_column,
        six_of_a_function,
        six_overwritten,
        scripted,
        parameter_made,
        number_of_numpys,
        write_that_may_fail,
        written_to_six,
        written_to_six_of_a_column,
    ],
)
def test_a_size_or_a_number_of_parts_that_follows_the_batch_in_steps_is_right_at_every_batch(
    function: Callable[..., Any], way: Callable[..., Any], batch: int
) -> None:
    equal_at((1, 5, 6, 7, 11, 5), *prepared(way(function), batch))


def test_an_excluded_batch_comes_with_the_op_that_makes_other_sizes_there() -> None:
    _, runtime = prepared(parts)
    assert runtime.plan.batches == Batches(((1, 5),))
    assert any("batch 6 to 10: op 1 makes 2 tensor(s) there, 1 in the plan" in e for e in runtime.plan.excluded)
    _, runtime = prepared(first_six)
    assert runtime.plan.batches == Batches(((1, 6),))
    assert any("batch 7 to 12: op 1 makes sizes [6, 4] there" in e for e in runtime.plan.excluded)


# The range of batches


def test_questions_about_the_batch_are_solved_as_they_are_asked_one_by_one() -> None:
    sizes = [b for b in range(1, 60) if b % 7]
    for text in ("B == 9", "3*B - 12 != 0", "7 < B", "2*B + 3 >= B + 17", "197 % (2*B) != 0", "(B + 4)//5 == 2", "B*B > 50",
                 "10//(B - 5) == 1", "min(B, 5) == 5", "B > 3 and B < 9", "B/2 == 3", "-B + 5 > 0", "B - 5", "5 == 5"):  # fmt: skip
        for answer in (True, False):

            def holds(batch: int, text: str = text, answer: bool = answer) -> bool:
                try:
                    return bool(Expr(text).evaluate({"B": batch})) == answer
                except ZeroDivisionError:
                    return False

            found = where(Expr(text), "B", answer, Batches.of(sizes))
            assert found == Batches.of([b for b in sizes if holds(b)]), (text, answer)


def test_sets_of_batches_are_joined_and_taken_apart_as_sets() -> None:
    for left, right in [({1, 2, 3, 7}, {2, 8}), (set(), {1}), ({4, 5, 9}, {1, 4, 5, 6, 9}), ({1, 2}, {3, 4})]:
        a, b = Batches.of(left), Batches.of(right)
        assert (a | b, a & b, a - b) == tuple(Batches.of(s) for s in (left | right, left & right, left - right))


def test_the_time_to_prepare_does_not_grow_with_the_range_of_batches() -> None:
    seconds = {}
    for upto in (64, 64, 10**6):
        start = time.perf_counter()
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).eval()
        runtime = prepare_split(model, (numbers(2, 3, 8, 8),), split=SplitSpec("50%", dynamic_batch=(1, upto)))
        seconds[upto] = time.perf_counter() - start
    assert runtime.plan.batches == Batches(((1, 10**6),))
    assert seconds[10**6] < seconds[64] + 1


# How inputs lie in memory


LAYOUTS = {
    "gapped": lambda b: numbers(b, 8)[:, ::2],
    "transposed": lambda b: numbers(4, b).t(),
    "gapped rows": lambda b: numbers(2 * b, 4)[::2],
    "contiguous": lambda b: numbers(b, 4),
    "expanded": lambda b: numbers(4).expand(b, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_examples_of_other_batches_lie_in_memory_as_a_callers_input_would(name: str) -> None:
    example = Example.of((LAYOUTS[name](3),), {})
    for batch in (2, 3, 5):
        (found,) = example.resized(batch)
        if name != "expanded" or batch == 3:
            assert (found.stride(), found.shape) == (LAYOUTS[name](batch).stride(), (batch, 4))
        assert torch.equal(found, LAYOUTS[name](3)[sorted(i % 3 for i in range(batch))])
    if name == "transposed":  # its own memory: no element stands for two
        assert found.add_(1).unique().numel() == LAYOUTS[name](3).unique().numel()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_forward_that_asks_how_its_input_lies_in_memory_serves_every_layout(name: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.b(m.a(x) * 2 if x.is_contiguous() else m.a(x) - 1)

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    runtime = prepare_split(model, (LAYOUTS[name](2),), split="50%")
    for batch in (2, 3, 1):
        x = LAYOUTS[name](batch)
        assert difference(model(x).detach(), runtime.run_suffix(runtime.run_prefix(x))) is None


@pytest.mark.parametrize("name", ["transposed", "gapped rows"])
def test_where_forward_asks_how_an_input_lies_another_may_lie_otherwise_at_batch_1(name: str) -> None:
    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return m.b(m.a(x) * 2 if x.is_contiguous() else m.a(x) - 1) * y

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    runtime = prepare_split(model, (numbers(2, 4), LAYOUTS[name](2)), split="50%")
    for batch in (1, 3):
        x, y = numbers(batch, 4), LAYOUTS[name](batch)
        assert difference(model(x, y).detach(), runtime.run_suffix(runtime.run_prefix(x, y))) is None


# Inputs that share a size with the batch by accident


def with_table(m: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(x) + table.sum(0))


def test_an_input_that_is_as_large_as_the_batch_by_accident_is_refused_elsewhere_with_the_way_out() -> None:
    model = Fn(with_table, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    table = numbers(3, 4)
    runtime = prepare_split(model, (numbers(3, 4), table), split="50%")
    assert (
        difference(model(numbers(3, 4), table).detach(), runtime.run_suffix(runtime.run_prefix(numbers(3, 4), table)))
        is None
    )
    for batch in (1, 2, 5):
        with pytest.raises(
            BatchError,
            match=r"input \[1\] has 3\. .* by accident, say SplitSpec\(batch_dim=.*, or prepare again with an",
        ):
            runtime.run_prefix(numbers(batch, 4), table)
    runtime = prepare_split(model, (numbers(2, 4), table), split="50%")
    for batch in (1, 2, 3, 5):
        x = numbers(batch, 4)
        assert difference(model(x, table).detach(), runtime.run_suffix(runtime.run_prefix(x, table))) is None
