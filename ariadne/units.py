"""Numbers with units, written the same way wherever a person reads them."""

from __future__ import annotations

import math


def digits(value: float) -> str:
    """A number with three digits that count, and no exponent.

    >>> digits(1234.5), digits(0.01234)
    ('1,234', '0.0123')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def size(nbytes: float, *, even: bool = False) -> str:
    """Bytes in words, by powers of 1000, with three digits; all three are written where `even`, as in a column of sizes.

    >>> size(196_608), size(12), size(2e6), size(2e6, even=True)
    ('197 kB', '12 B', '2 MB', '2.00 MB')
    """
    scale, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if nbytes >= s), (1, "B"))
    text = digits(nbytes / scale)
    if "." in text and not (even and scale > 1):
        text = text.rstrip("0").rstrip(".")
    return f"{text} {unit}"
