"""Numbers, intervals and places as a report writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

from ariadne import units
from ariadne.units import digits
from benchmarks.findings import Place
from benchmarks.statistics import Interval

size = partial(units.size, even=True)
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def ratio(value: Interval) -> str:
    """A ratio of times and its interval, "0.953 (0.941 to 0.966)"."""
    return number_with_bounds(value, lambda v: f"{v:.3f}")


def seconds(value: float) -> str:
    """A duration with three digits, in the unit that suits it.

    >>> seconds(0.0123)
    '12.3 ms'
    """
    size, unit = next((u for u in UNITS if abs(value) >= u[0]), UNITS[0] if value == 0 else UNITS[-1])
    return f"{digits(value / size)} {unit}"


def seconds_interval(value: Interval | None) -> str:
    """A duration with its interval, all in the unit that suits the estimate."""
    if value is None:
        return ""
    size, unit = next((u for u in UNITS if abs(value.estimate) >= u[0]), UNITS[0] if value.estimate == 0 else UNITS[-1])
    return number_with_bounds(value, lambda v: digits(v / size), f" {unit}")


def number_with_bounds(value: Interval, write: Callable[[float], str], unit: str = "") -> str:
    """An estimate with its bounds in brackets, or alone where a single process gives none."""
    if math.isinf(value.high) or math.isinf(value.low):
        return write(value.estimate) + unit
    return f"{write(value.estimate)}{unit} ({write(value.low)} to {write(value.high)})"


def plural(count: int, noun: str, many: str = "") -> str:
    """A count with its noun, which takes an s where `many` is not given.

    >>> plural(1, "case"), plural(1200, "case")
    ('1 case', '1,200 cases')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def where(place: Place) -> str:
    """Task, batch and device of a place."""
    return f"{place.task}, batch {place.batch}, {place.device}"


def one_line(text: str, longest: int = 320) -> str:
    """A text on one line, without the marks under a traceback's lines; a longer one loses its middle, for errors end it."""
    words = " ".join(re.sub(r"[~^]{3,}", " ", text).split())
    if len(words) <= longest:
        return words
    head = 2 * longest // 3
    return f"{words[:head].rstrip()} … {words[head + 3 - longest :].lstrip()}"
