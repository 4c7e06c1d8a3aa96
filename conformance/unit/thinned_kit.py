"""Which cases of a product of parameters CI leaves out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

FEW = 6  # so many cases are all run
Case = TypeVar("Case")


def off_the_diagonal(cases: Sequence[Case], params: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Of a product of parameters all cases but a few, which have each value of each parameter at least once.

    None are left out where the cases are few, or are no whole product.
    """
    if len(cases) <= FEW:
        return []
    columns = {numbered([given[name] for given in params]) for name in params[0]}  # what is given together is one
    axes = sorted(columns, key=lambda column: (-max(column), column))
    sizes = [max(axis) + 1 for axis in axes]
    if len(axes) < 2 or len(cases) != math.prod(sizes):
        return []
    kept = set[tuple[int, ...]]()
    for first in range(sizes[0]):
        turned = first + first // sizes[1]  # so that of three the second and the third don't go hand in hand
        kept.add((first, *((turned if place == 1 else first) % size for place, size in enumerate(sizes[1:], start=1))))
    return [case for case, place in zip(cases, zip(*axes, strict=True), strict=True) if place not in kept]


def numbered(values: Sequence[Any]) -> tuple[int, ...]:
    """For each value its number among those that differ, as they come."""
    known: dict[int, int] = {}
    return tuple(known.setdefault(id(value), len(known)) for value in values)
