"""What a run counted, as one JSON line in the file that ARIADNE_FUZZ_RESULTS names; docs/conformance.md is made from it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

from conformance.random_networks.counts import Counts
from conformance.random_networks.program import Program
from conformance.suite.environment import ROOT, sources

VARIABLE = "ARIADNE_FUZZ_RESULTS"
MOST_EXAMPLES = 100  # how many of the refused programs a line of results has


class Tally:
    """Counts over the programs of one run."""

    def __init__(self, kind: str, profile: str) -> None:
        self.kind, self.profile, self.start = kind, profile, time.monotonic()
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()  # programs, by the class of the error
        self.limits: Counter[str] = Counter()  # programs, by the limit that they met
        self.drawn: Counter[str] = Counter()  # programs, by the kinds of steps that they have
        self.refused: list[dict[str, Any]] = []  # programs, with the words of what was refused, to be replayed

    def add(self, counts: Counts, program: Program) -> None:
        """One program that was held against every promise."""
        self.drawn.update({step["do"] for step in program.steps})
        self.counts.update(programs=1, cuts=counts.cuts, unsafe=counts.unsafe, replays=counts.replays)
        self.refusals.update({text.partition(":")[0] for text in counts.refused})
        self.limits.update({*counts.limited})
        if counts.refused and len(self.refused) < MOST_EXAMPLES:
            self.refused.append({"words": sorted({*counts.refused}), "program": json.loads(program.to_json())})
        self.counts.update(
            steps=counts.steps,
            raising=counts.raising,
            limited=bool(counts.limited),
            refused=bool(counts.refused),
            uncut=counts.uncut,
            inexact=counts.inexact,
            captured=counts.captured,
            penalised=counts.penalised,
        )

    def line(self) -> dict[str, Any]:
        """The counts, each there even where it is zero."""
        names = "programs cuts unsafe replays steps penalised captured raising limited refused uncut inexact invalid".split()
        seconds = round(time.monotonic() - self.start, 1)
        line = {"kind": self.kind, "profile": self.profile, "sources": sources(ROOT), "seconds": seconds}
        line |= {n: self.counts[n] for n in (*names, "failures")}
        found = {"limits": self.limits, "refusals": self.refusals, "drawn": self.drawn}
        line |= {name: dict(sorted(counted.items())) for name, counted in found.items()}
        return line | {"refused_examples": self.refused}

    def write(self) -> None:
        """Append the counts to the file that the environment names, if it names one."""
        path = os.environ.get(VARIABLE)
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.line()) + "\n")
