"""What may be said about timings: intervals over processes, and differences that count.

The unit is the process. Samples taken in one process share its memory layout, its thread placement and its moment, so
that thousands of them say nothing about the next process; each process gives one number, its median, and every interval
here is Student's over those numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95
FEWEST_PROCESSES = 5
LEAST_DIFFERENCE = 0.02


class TooFewSamplesError(ValueError):
    """There are fewer samples than a figure needs; the message says how many it takes."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds within which the true value is supposed to lie, with confidence `CONFIDENCE`."""

    estimate: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Comparison:
    """A ratio of times (below 1 is faster), held against the noise floor.

    `floor`: how far an eager-against-eager pair of the same processes strayed from 1, as a share (0.03 is 3 %).
    `verdict`: "faster", "slower" or "no difference shown", and `reason` says why it is the last.
    """

    ratio: Interval
    floor: float
    processes: int
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Geomean:
    """A geometric mean over a fixed set of models: of how many of them (`n` of `total`), and why the others have no value.

    `processes`: how many processes measured all of these models, and so are in the interval.
    """

    ratio: Interval | None
    n: int
    total: int
    failures: Mapping[str, str]
    processes: int = 0


def student_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for Student's t with a whole number of degrees of freedom: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if freedom < 1:
        raise ValueError(f"Student's t has at least one degree of freedom; found {freedom}")
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cos2, term, total = math.cos(angle) ** 2, 1.0, 0.0
    if freedom % 2:
        for k in range(2, freedom, 2):  # cos + 2/3 cos^3 + ...
            total += term
            term *= cos2 * k / (k + 1)
        within = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    else:
        for k in range(1, freedom, 2):  # 1 + 1/2 cos^2 + ...
            total += term
            term *= cos2 * k / (k + 1)
        within = math.sin(angle) * total
    return 0.5 + math.copysign(within / 2, t)


@lru_cache(maxsize=512)
def student_quantile(p: float, freedom: int) -> float:
    """The t below which Student's t lies with probability `p`."""
    if not 0 < p < 1:
        raise ValueError(f"a probability lies between 0 and 1; found {p}")
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    high = 1.0
    while student_cdf(high, freedom) < p:
        high *= 2
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return high


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of process summaries with Student's interval; with a single one, an interval without bounds."""
    if not values:
        raise TooFewSamplesError("an interval needs at least one process; found none")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = student_quantile((1 + confidence) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio_of_pairs(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """One process in one number: the median over its pairs of numerator over denominator."""
    if not numerators:
        raise TooFewSamplesError("a ratio needs at least one pair; found none")
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of the processes' ratios, with the interval of its logarithm."""
    found = interval([math.log(r) for r in ratios])
    return Interval(math.exp(found.estimate), math.exp(found.low), _exp(found.high))


def _exp(value: float) -> float:
    return math.inf if value == math.inf else math.exp(value)


def noise_floor(noise: Sequence[float]) -> float:
    """The furthest that any process's eager-against-eager ratio strayed from 1, as a share."""
    if not noise:
        raise TooFewSamplesError("the noise floor needs an eager-against-eager pair; found none")
    return max(map(size_of, noise))


def size_of(ratio: float) -> float:
    """How far a ratio lies from 1, as a share, the same for a ratio and its inverse."""
    return math.exp(abs(math.log(ratio))) - 1


def too_small(ratio: float, floor: float) -> str:
    """Why a ratio is no difference, small as it is, or an empty text."""
    if size_of(ratio) <= LEAST_DIFFERENCE:
        return f"within {LEAST_DIFFERENCE:.0%}"
    return f"within the noise floor of {floor:.1%}" if size_of(ratio) <= floor else ""


def doubt(ratio: Interval, processes: int, floor: float) -> str:
    """Why a ratio of this many processes shows no difference, or an empty text."""
    if processes < FEWEST_PROCESSES:
        return f"{processes} of at least {FEWEST_PROCESSES} processes"
    return "the interval holds 1" if 1.0 in ratio else too_small(ratio.estimate, floor)


def compare(ratios: Sequence[float], noise: Sequence[float]) -> Comparison:
    """The verdict about one ratio for each process, against the eager-against-eager ratios of the same processes.

    A difference counts only where at least `FEWEST_PROCESSES` processes measured it, the interval is clear of 1, and the
    estimate lies beyond the noise floor and beyond `LEAST_DIFFERENCE`.
    """
    ratio, floor = ratio_interval(ratios), noise_floor(noise)
    reason = doubt(ratio, len(ratios), floor)
    verdict = "no difference shown" if reason else "faster" if ratio.estimate < 1 else "slower"
    return Comparison(ratio, floor, len(ratios), verdict, reason)


@lru_cache(maxsize=64)
def samples_needed(quantile: float) -> int:
    """How many samples a tail percentile takes: the fewest of which two or more lie above it with 99 % certainty.

    64 for p90 and 662 for p99, as in MLPerf LoadGen's early stopping (mlcommons/inference, loadgen/early_stopping.cc).
    """
    if not 0 < quantile < 1:
        raise ValueError(f"a quantile lies between 0 and 1; found {quantile}")
    n = 2
    while quantile**n + n * (1 - quantile) * quantile ** (n - 1) > 0.01:
        n += 1
    return n


def percentile(samples: Sequence[float], quantile: float) -> float:
    """The smallest sample that at least that share of all samples does not exceed.

    Raises `TooFewSamplesError` under `samples_needed(quantile)`.

    >>> percentile(range(1, 101), 0.9)
    90
    """
    needed = samples_needed(quantile)
    if len(samples) < needed:
        raise TooFewSamplesError(
            f"p{100 * quantile:g} takes at least {needed} samples; found {len(samples)}. Take more, or give the median"
        )
    return sorted(samples)[math.ceil(quantile * len(samples)) - 1]


def geometric_mean(results: Mapping[str, Mapping[int, float] | str]) -> Geomean:
    """The geometric mean over a fixed set of models, each with the ratios of its processes, or the words of its failure.

    The interval is over processes: each gives the geometric mean of its models. Only the processes that all models have count;
    where there is none, no model has a value.
    """
    values = {name: found for name, found in results.items() if not isinstance(found, str)}
    failures = {name: found for name, found in results.items() if isinstance(found, str)}
    if not values:
        return Geomean(None, 0, len(results), failures)
    shared = sorted(set.intersection(*(set(found) for found in values.values())))
    if not shared:
        apart = dict.fromkeys(values, "no process has all of the models")
        return Geomean(None, 0, len(results), failures | apart)
    ratios = [statistics.geometric_mean(found[process] for found in values.values()) for process in shared]
    return Geomean(ratio_interval(ratios), len(values), len(results), failures, len(shared))
