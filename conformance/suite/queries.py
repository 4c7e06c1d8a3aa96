"""Brace lists: many names of cases, or queries, written as one line.

`forward/nn/mlp10x64/cut={first,q50},bs={1,2}` means four cases. A name or query without braces means itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from conformance.suite.cases import BACKENDS, CUTS, MODES, Case, checked_query

_BRACES = re.compile(r"\{([^{}]*)\}")


def expand(text: str) -> tuple[str, ...]:
    """Every text that a line with brace lists means, in order; ValueError for braces that don't pair or nest.

    >>> expand("forward/{nn,timm}/*")
    ('forward/nn/*', 'forward/timm/*')
    """
    pieces = _BRACES.split(text)
    if any(brace in piece for piece in pieces[::2] for brace in "{}"):
        raise ValueError(f"braces don't pair in {text!r}; a list is {{one,two}}, and lists don't nest")
    lists = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return tuple("".join(chosen) for chosen in itertools.product(*lists))


def queries(text: str) -> tuple[str, ...]:
    """The queries that a line means; ValueError for one that is neither a case's name nor a prefix and `*`."""
    return tuple(checked_query(query) for query in expand(text))


def compact(cases: Iterable[Case]) -> list[str]:
    """The fewest easily read lines with brace lists that mean exactly these cases, sorted."""
    groups: dict[tuple[str, str, tuple[str, ...]], set[tuple[str, ...]]] = {}
    for case in cases:
        keys = tuple(key for key, _ in case.parameters)
        groups.setdefault((case.check, case.model, keys), set()).add(tuple(value for _, value in case.parameters))
    found = []
    for (check, model, keys), rows in groups.items():
        for product in _products(rows, keys):
            lists = (
                f"{key}={values[0] if len(values) == 1 else '{' + ','.join(values) + '}'}"
                for key, values in zip(keys, product, strict=True)
            )
            found.append(f"{check}/{model}/{','.join(lists)}")
    return sorted(found)


def _products(rows: set[tuple[str, ...]], keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """A set of rows as disjoint products: the values of the first key that go with the same rest stand together."""
    if not keys:
        yield ()
        return
    rests: dict[str, set[tuple[str, ...]]] = {}
    for first, *rest in rows:
        rests.setdefault(first, set()).add(tuple(rest))
    together: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for value in sorted(rests, key=lambda v: rank(keys[0], v)):
        together.setdefault(frozenset(rests[value]), []).append(value)
    for rest, values in together.items():
        for product in _products(set(rest), keys[1:]):
            yield (tuple(values), *product)


def rank(key: str, value: str) -> tuple[int, int, str]:
    """Where a parameter's value stands among others of its key: numbers by size, words in the order of the vocabulary."""
    if value.isdigit():
        return 0, int(value), value
    order = {"cut": CUTS, "mode": MODES, "backend": BACKENDS}.get(key, ())
    return 1, order.index(value) if value in order else len(order), value


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Cases by model, then check, then parameters as `rank` has them."""
    return sorted(cases, key=lambda c: (c.model, c.check, [(k, rank(k, v)) for k, v in c.parameters]))
