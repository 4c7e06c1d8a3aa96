"""Sizes of a call: whether they are in range, and the conditions of a plan hold at them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ariadne.plan import Expr, TracePlan


def fits(plan: TracePlan, symbols: tuple[str, ...]) -> Callable[..., bool]:
    """Whether a plan serves a batch and sizes, in the order of `symbols`; what is known of the last calls' is kept."""
    within = {s.symbol: s.within for s in plan.sizes}
    condition = Expr(" and ".join(f"({c})" for c in plan.conditions) or "1 > 0")

    @lru_cache(maxsize=1024)
    def served(batch: int, *sizes: int) -> bool:
        named = {plan.batch_symbol: batch, **dict(zip(symbols, sizes, strict=True))}
        return all(named[s] in within[s] for s in symbols) and condition.holds(named)

    return served
