"""Break-even: after how many calls has an optimisation that costs something at the start cost no more than eager.

The cost `X` of a process is the excess of all its calls before steady state, and of preparation, over as many calls at the
steady rate; its saving `s` is what a steady call saves. After n calls the balance is `n s - X`, and break-even is where it
reaches zero. The interval is Fieller's, over process summaries, for the payback rate `s / X`, the share of the cost that a
call pays back: its denominator is well clear of zero, so the interval is bounded, and "no saving" is a rate of zero, an
ordinary value, where for `n = X / s` it lies at infinity.

E. C. Fieller, "Some problems in interval estimation", Journal of the Royal Statistical Society B 16 (1954), 175-185.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.statistics import (
    CONFIDENCE,
    FEWEST_PROCESSES,
    Interval,
    interval,
    noise_floor,
    ratio_interval,
    student_quantile,
    too_small,
)

BETWEEN, NOT_SHOWN, NEVER = "between", "not shown", "never"


@dataclass(frozen=True)
class BreakEven:
    """The verdict, and with "between" the bounds of n; `rate` is the payback rate per call, or per second of eager calls."""

    verdict: str
    rate: Interval | None = None
    low: float = math.nan
    high: float = math.nan
    reason: str = ""

    def words(self, unit: str = "calls") -> str:
        """The verdict as it is published.

        >>> BreakEven("between", low=95.2, high=130.0).words()
        'between 96 and 130 calls'
        """
        if self.verdict == BETWEEN and self.high == 0:
            return "from the first call"
        if self.verdict == BETWEEN:
            low, high = (
                f"{math.ceil(v) if unit == 'calls' else float(f'{v:.3g}'):,.9g}" for v in (self.low, self.high)
            )
            return f"between {low} and {high} {unit}"
        return f"{self.verdict} ({self.reason})" if self.reason else self.verdict


def excess(preparation: float, calls: Sequence[float], steady: float) -> float:
    """X of one process: the seconds of preparation and of all calls before steady state, beyond that many steady calls."""
    return preparation + math.fsum(calls) - len(calls) * steady


def fieller(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """The interval of mean(numerators) / mean(denominators) over processes; None where the denominator is not clear of 0.

    It holds every rate r at which Student's test on `numerator - r * denominator` finds nothing against a mean of zero.
    """
    n = len(numerators)
    if n != len(denominators):
        raise ValueError(f"each process gives a numerator and a denominator; found {n} and {len(denominators)}")
    if n < 2:
        return None
    a, b = statistics.fmean(numerators), statistics.fmean(denominators)
    scale = student_quantile((1 + CONFIDENCE) / 2, n - 1) ** 2 / n
    aa, bb = scale * statistics.variance(numerators), scale * statistics.variance(denominators)
    ab = scale * statistics.covariance(numerators, denominators)
    # (a - r b)^2 <= aa - 2 r ab + r^2 bb
    square, linear, constant = b * b - bb, a * b - ab, a * a - aa
    if square <= 0:
        return None
    root = math.sqrt(max(0.0, linear * linear - square * constant))
    return Interval(a / b, (linear - root) / square, (linear + root) / square)


def break_even(costs: Sequence[float], savings: Sequence[float]) -> BreakEven:
    """The verdict from each process's cost X in seconds and saving per call in seconds.

    "between": the whole interval of the payback rate is above zero. "never": all of it is below. "not shown": it holds zero,
    or there are fewer than `FEWEST_PROCESSES` processes, or the cost itself is not clear of zero.
    """
    if len(costs) < FEWEST_PROCESSES:
        return BreakEven(NOT_SHOWN, reason=f"{len(costs)} of at least {FEWEST_PROCESSES} processes")
    cost, saving = interval(costs), interval(savings)
    if cost.high <= 0 and saving.low >= 0:
        return BreakEven(BETWEEN, low=0.0, high=0.0)
    rate = fieller(savings, costs)
    if rate is None or cost.estimate <= 0:
        return BreakEven(NOT_SHOWN, rate, reason="the cost is not clear of zero")
    if rate.high < 0:
        return BreakEven(NEVER, rate)
    if rate.low <= 0:
        return BreakEven(NOT_SHOWN, rate, reason="the interval of the saving holds zero")
    return BreakEven(BETWEEN, rate, low=1 / rate.high, high=1 / rate.low)


def break_even_seconds(costs: Sequence[float], savings: Sequence[float], eager: Sequence[float]) -> BreakEven:
    """The same in seconds of work at eager's pace: `eager` holds each process's seconds of an eager call."""
    return break_even(costs, [s / e for s, e in zip(savings, eager, strict=True)])


def held_against(noise: Sequence[float], ratios: Sequence[float], found: BreakEven) -> BreakEven:
    """The verdict where a steady call's ratio to the model's is a difference, beyond 2 % and the noise floor; else "not shown".

    `ratios` and `noise` hold one number for each process, a variant's and an eager-against-eager pair's.
    """
    if found.verdict == NOT_SHOWN:
        return found
    if not noise:
        return BreakEven(NOT_SHOWN, found.rate, reason="no eager-against-eager pair to hold the saving against")
    why = too_small(ratio_interval(ratios).estimate, noise_floor(noise))
    return BreakEven(NOT_SHOWN, found.rate, reason=f"the saving is {why}") if why else found


def curve(costs: Sequence[float], savings: Sequence[float], calls: Sequence[int]) -> list[tuple[int, Interval]]:
    """The balance in seconds after each number of calls, positive once it has paid; its bounds cross zero where n's lie."""
    pairs = list(zip(costs, savings, strict=True))
    return [(n, interval([n * s - x for x, s in pairs])) for n in calls]


def grid(last: float, each: int = 8) -> list[int]:
    """Numbers of calls for a curve on a logarithmic axis: 1 to beyond `last`, `each` to a decade."""
    steps = max(1, math.ceil(math.log10(max(last, 10.0)) * each))
    return sorted({round(10 ** (k / each)) for k in range(steps + 1)})
