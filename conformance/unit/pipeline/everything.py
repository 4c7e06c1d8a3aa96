"""Every case under every schedule, on 2 and on 4 ranks: `python -m conformance.unit.pipeline.everything`. Takes minutes."""

from __future__ import annotations

import sys

from ariadne.errors import SpecError
from ariadne.pipeline.steps import NAMES, stages_of
from conformance.unit.pipeline.nets import CASES
from conformance.unit.pipeline.ranks import matrix, run


def cases(world: int) -> list[tuple[str, str, int, int]]:
    """Each net under each schedule, with as many parts as that wants; as many micro-batches as parts."""
    found = []
    for name in NAMES:
        parts = world
        try:
            stages_of(name, parts, 0, world)
        except SpecError:
            parts = 2 * world
        if name.startswith(("Interleaved", "Looped")):
            parts = 2 * world
        found += [(case, name, parts, max(4, parts)) for case in CASES]
    return found


def main() -> int:
    """Run them; 1 where anything differs."""
    wrong = 0
    for world in (2, 4):
        asked = cases(world)
        for rank, (error, result) in enumerate(run(matrix, world, asked, limit=1200)):
            bad = (
                {case: words for case, words in result.items() if words} if error is None else {"all": [error, result]}
            )
            wrong += len(bad)
            print(
                f"{world} ranks, rank {rank}: {len(asked) - len(bad)} of {len(asked)} equal", *bad.items(), sep="\n  "
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
