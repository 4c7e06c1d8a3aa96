"""`ariadne cache`: the packages that mode="compiled" keeps for the next process; how many, how large, how large they may be."""

from __future__ import annotations

import time
from argparse import Namespace

from ariadne.cli.output import Answer, UsageError, table
from ariadne.compiled import Kept
from ariadne.units import size


def run(options: Namespace) -> Answer:
    """List them, say what they take, throw them away, or set how much they may take."""
    kept = Kept.of_user()
    if options.bytes is not None and options.what != "limit":
        raise UsageError(
            f"ariadne cache {options.what} takes no size; ariadne cache limit SIZE sets the most they may take"
        )
    if options.what == "clear":
        freed = kept.clear()
        return Answer(f"{kept.path}: {size(freed)} thrown away", {"folder": str(kept.path), "freed": freed})
    kept.trusted()
    if options.what == "limit" and options.bytes is not None:
        kept.limit = options.bytes
        freed = kept.prune()
        return Answer(
            f"{kept.path} holds {size(options.bytes)} at most; {size(freed)} thrown away",
            {"folder": str(kept.path), "limit": options.bytes, "freed": freed},
        )
    cards, taken, limit = kept.cards(), kept.size, kept.limit
    data = {
        "folder": str(kept.path),
        "bytes": taken,
        "limit": limit,
        "packages": [
            {"about": c.told.get("about", ""), "bytes": c.size, "batches": str(c.batches), "used": c.used}
            for c in cards
        ],
    }
    words = f"{kept.path}: {len(cards)} package(s), {size(taken)} of {size(limit)}"
    if options.what != "list" or not cards:
        return Answer(words, data)
    rows = [
        (c.told.get("about", ""), str(c.batches), size(c.size, even=True), _ago(time.time() - c.used))
        for c in reversed(cards)
    ]
    return Answer(f"{table(['package', 'batches', '>size', '>last used'], rows)}\n\n{words}", data)


def _ago(seconds: float) -> str:
    """A time that has gone by, in its largest unit.

    >>> _ago(7300)
    '2 h ago'
    """
    for step, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= step:
            return f"{int(seconds // step)} {unit} ago"
    return "just now"
