"""Numbers with units, written the same way wherever a person reads them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in words, by powers of 1000, with three digits.

    >>> size(196_608), size(12)
    ('197 kB', '12 B')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.3g} {unit}"
    return f"{nbytes:.3g} B"
