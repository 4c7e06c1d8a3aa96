"""Every net under every schedule, in 2, 4 and 8 parts: `python -m conformance.unit.pipeline.everything [NET]`. Takes minutes.

Each run is three optimizer steps on batches of other sizes, the last micro-batches smaller, with an evaluation after each step:
losses, outputs, gradients, buffers, parameters and the generator, bit for bit, against the whole model over the same micro-batches.
"""

from __future__ import annotations

import sys
from collections import Counter

from ariadne.errors import SpecError
from ariadne.pipeline.steps import NAMES, stages_of
from conformance.unit.pipeline.nets import CASES
from conformance.unit.pipeline.ranks import matrix, run

WORLDS = (1, 2, 4)
PARTS = (2, 4, 8)
Asked = tuple[str, str, int, int] | tuple[str, str, int, int, str, str]


def runs(name: str, parts: int, world: int) -> bool:
    """Whether a schedule runs so many parts on so many ranks, one or two on each."""
    try:
        return 1 <= len(stages_of(name, parts, 0, world)) <= 2
    except SpecError:
        return False


def cases(world: int, nets: tuple[str, ...] = tuple(CASES)) -> list[Asked]:
    """Each net under each schedule on so many ranks; as many micro-batches as parts, and four at least.

    What draws is asked by both rules of random numbers.
    """
    found: list[Asked] = []
    for name in NAMES:
        for parts in (p for p in PARTS if runs(name, p, world)):
            count = max(4, parts)
            found += [(net, name, parts, count) for net in nets if net != "noisy_loss"]
            seeded = [net for net in nets if net in ("dropout", "noisy_loss", "all")]
            found += [(net, name, parts, count, "Adam", "seeded") for net in seeded]
    return found


def main(nets: tuple[str, ...]) -> int:
    """Run them; 1 where anything differs. Says for each schedule and number of parts how many nets are equal on all ranks."""
    equal, asked_for, wrong = Counter[str](), Counter[str](), 0
    for world in WORLDS:
        asked = cases(world, nets)
        bad: dict[str, str] = {}
        for rank, (error, result) in enumerate(run(matrix, world, asked, limit=3600)):
            if error is not None:
                bad |= dict.fromkeys(map(str, asked), f"rank {rank}: {error}\n{result}")
                continue
            bad |= {case: f"rank {rank}: {words}" for case, words in result.items() if words}
        for case in asked:
            row = f"{case[1]}, {case[2]} parts on {world} rank(s)"
            asked_for[row] += 1
            equal[row] += str(case) not in bad
        wrong += len(bad)
        for row in [r for r in asked_for if r.endswith(f"on {world} rank(s)")]:
            print(f"{row}: {equal[row]} of {asked_for[row]} equal", flush=True)
        print(*(f"{case}: {words}" for case, words in bad.items()), sep="\n", flush=True)
    print(f"{sum(equal.values())} of {sum(asked_for.values())} equal")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or tuple(CASES)))
