"""The sizes beside the batch that a half serves, as data and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ariadne.halves.atoms import Reader, count, items, name, need, table, text
from ariadne.plan import MOST, Expr, Size, TracePlan

NO_SIZES: dict[str, Any] = {
    "dims": [],
    "traced": [],
    "conditions": [],
}  # what older files mean, which say nothing of sizes


def told_sizes(plan: TracePlan) -> dict[str, Any]:
    """What a plan says of its sizes, as JSON-able data."""
    return {
        "dims": [[s.leaf, s.dim, s.symbol, s.within.start, s.within.stop, s.within.step, s.input] for s in plan.sizes],
        "traced": [[symbol, size] for symbol, size in plan.traced_sizes],
        "conditions": [condition.source for condition in plan.conditions],
    }


def with_sizes(plan: TracePlan, data: Any) -> TracePlan:
    """A plan with the sizes that `told_sizes` wrote; each number and name is looked at."""
    d = table(data, "the sizes", ("dims", "traced", "conditions"))
    sizes = tuple(_size(items(found, "a size"), plan.batch_symbol) for found in items(d["dims"], "the sizes"))
    symbols = {s.symbol for s in sizes}
    traced = [items(found, "a size") for found in items(d["traced"], "the sizes")]
    need(all(len(found) == 2 for found in traced), "a size is malformed")
    reader = Reader()
    reader.symbols = {plan.batch_symbol, *symbols}
    known = tuple((name(symbol, "a symbol"), count(size, "a size", 1, MOST)) for symbol, size in traced)
    need({symbol for symbol, _ in known} == symbols, "the sizes are malformed")
    conditions = tuple(reader.size(c) for c in items(d["conditions"], "the conditions"))
    return replace(plan, sizes=sizes, traced_sizes=known, conditions=conditions)


def _size(data: list[Any], batch_symbol: str) -> Size:
    need(len(data) == 7, "a size is malformed")
    leaf, dim, symbol, start, stop, step, called = data
    need(name(symbol, "the symbol of a size") != batch_symbol, "a size is called as the batch")
    low = count(start, "a size", 1, MOST)
    within = range(low, count(stop, "a size", low + 1, MOST), count(step, "a size", 1, MOST))
    return Size(
        count(leaf, "an input", most=MOST), count(dim, "a dim", most=63), symbol, within, text(called, "an input")
    )


def need_sizes_of_inputs(plan: TracePlan) -> None:
    """Raise `HalfError` unless the inputs have the dims that are named, and follow no size but these and the batch."""
    dims = {(i, d): size for i, n in plan.inputs for d, size in enumerate(plan.values[n].shape)}
    symbols = {(s.leaf, s.dim): s.symbol for s in plan.sizes}
    need(symbols.keys() <= dims.keys(), "a size is of no input")
    followed = [
        size.source == symbols.get(at, plan.batch_symbol) for at, size in dims.items() if isinstance(size, Expr)
    ]
    need(all(followed), "a size of an input follows what it does not name")
