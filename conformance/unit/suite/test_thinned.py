"""What CI leaves out of products of parameters: each value of each parameter stays."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from conformance.unit.thinned_kit import off_the_diagonal


def kept(params: list[dict[str, Any]]) -> list[int]:
    left_out = off_the_diagonal(range(len(params)), params)
    return [i for i in range(len(params)) if i not in left_out]


@pytest.mark.parametrize("sizes", [(7, 3), (3, 7), (8, 2, 2), (2, 8, 2), (3, 3, 3), (2, 3, 5, 2)])
def test_each_value_of_each_parameter_stays(sizes: tuple[int, ...]) -> None:
    names = [f"p{i}" for i in range(len(sizes))]
    params = [dict(zip(names, given, strict=True)) for given in product(*map(range, sizes))]
    stay = [params[i] for i in kept(params)]
    assert len(stay) == max(sizes)
    for name, size in zip(names, sizes, strict=True):
        assert {given[name] for given in stay} == {*range(size)}


def test_of_two_short_parameters_every_pair_stays() -> None:
    params = [{"a": a, "b": b, "c": c} for a, b, c in product(range(8), range(2), range(2))]
    assert {(params[i]["b"], params[i]["c"]) for i in kept(params)} == {*product(range(2), range(2))}


@pytest.mark.parametrize(
    "params",
    [
        [{"a": a, "b": b} for a, b in product(range(3), range(2))],
        [{"a": a, "b": a * 2} for a in range(9)],
        [{"a": a, "b": b} for a, b in product(range(5), range(4)) if (a, b) != (1, 1)],
        [{"a": a} for a in range(20)],
    ],
    ids=["few", "given together", "no product", "one parameter"],
)
def test_where_there_is_no_long_product_all_stay(params: list[dict[str, Any]]) -> None:
    assert len(kept(params)) == len(params)
