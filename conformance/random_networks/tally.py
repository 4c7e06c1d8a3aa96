"""What a run counted, as one JSON line in the file that ARIADNE_FUZZ_RESULTS names; docs/conformance.md is made from it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

from conformance.random_networks.counts import Counts
from conformance.suite.environment import ROOT, sources

VARIABLE = "ARIADNE_FUZZ_RESULTS"
PROFILE = os.environ.get("ARIADNE_HYPOTHESIS_PROFILE", "smoke")  # how many programs are drawn: smoke, full or nightly


class Tally:
    """Counts over the programs of one run."""

    def __init__(self, kind: str, profile: str) -> None:
        self.kind, self.profile, self.start = kind, profile, time.monotonic()
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()  # programs, by the class of the error

    def add(self, counts: Counts) -> None:
        """One program that was held against every promise."""
        self.counts.update(programs=1, cuts=counts.cuts, unsafe=counts.unsafe, replays=counts.replays)
        self.refusals.update({text.partition(":")[0] for text in counts.refused})
        self.counts.update(
            steps=counts.steps,
            raising=counts.raising,
            refused=bool(counts.refused),
            uncut=counts.uncut,
            inexact=counts.inexact,
        )

    def line(self) -> dict[str, Any]:
        """The counts, each there even where it is zero."""
        names = "programs cuts unsafe replays steps raising refused uncut inexact invalid failures".split()
        seconds = round(time.monotonic() - self.start, 1)
        line = {"kind": self.kind, "profile": self.profile, "sources": sources(ROOT), "seconds": seconds}
        line |= {n: self.counts[n] for n in names}
        return line | {"refusals": dict(sorted(self.refusals.items()))}

    def write(self) -> None:
        """Append the counts to the file that the environment names, if it names one."""
        path = os.environ.get(VARIABLE)
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.line()) + "\n")
