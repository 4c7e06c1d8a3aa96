"""The frontier profile: what crosses at every cut of a plan, and which cuts are worth a look, as frozen data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ariadne.cut import Ends, SplitCandidate, ends_of
from ariadne.plan import TracePlan
from ariadne.visualization import labels
from ariadne.visualization.fold import Folding, Frame, fold, frames

MOST_BANDS = 12


@dataclass(frozen=True, slots=True)
class Times:
    """What was measured at one cut: median seconds of both sides together, and the prefix's share of them, from 0 to 1.

    `low` and `high` hold the share of four calls of five.
    """

    both: float
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, calls: Sequence[tuple[float, float]]) -> Times:
        """From the seconds of prefix and suffix in each call."""
        shares = sorted(a / (a + b) for a, b in calls)
        tenth = len(shares) // 10
        both = statistics.median(a + b for a, b in calls)
        return cls(both, statistics.median(shares), shares[tenth], shares[-1 - tenth])


@dataclass(frozen=True, slots=True)
class Point:
    """One cut of the profile.

    `module`: where the last op of the prefix runs, `op`: what it does. `kind`: that of the module that ends there, or of that
    in which the op runs. `best`: safe, sends less than the model's input, and no
    safe cut with fewer ops in the prefix sends as few bytes.
    """

    candidate: SplitCandidate
    module: str
    kind: str
    op: str
    times: Times | None = None
    best: bool = False
    chosen: bool = False

    @property
    def boundary(self) -> str:
        """The boundary string that asks for this cut."""
        return f"after:{self.candidate.after}" if self.candidate.after else self.candidate.split_id

    @property
    def where(self) -> str:
        """What it cuts after: a module, or an op within one."""
        return self.candidate.after or f"{self.op} in {self.module or 'the model itself'}"


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of ops that one module runs."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Every cut of a plan along its ops."""

    title: str
    ops: int
    points: tuple[Point, ...]
    bands: tuple[Band, ...]
    ends: Ends

    @property
    def best(self) -> tuple[Point, ...]:
        """The Pareto-best cuts, from the first to the last: each sends less than the input and all safe cuts before it."""
        return tuple(p for p in self.points if p.best)

    @property
    def measured(self) -> bool:
        """Whether times were given for some cuts."""
        return any(p.times is not None for p in self.points)


def profile(
    plan: TracePlan,
    candidates: Sequence[SplitCandidate],
    chosen: SplitCandidate | None = None,
    times: Mapping[int, Times] | None = None,
) -> Profile:
    """The profile of a plan's cuts; `times` are by the number of ops in the prefix, for as many cuts as were measured."""
    ends = ends_of(plan)
    best = {c.cut for c in pareto(candidates, ends)}
    root = frames(plan)
    kinds = {f.call.path: f.call.kind for f in root.inside()}
    points = []
    for c in candidates:
        node = plan.nodes[c.cut - 1]
        here = chosen is not None and c.cut == chosen.cut
        kind, op = kinds.get(c.after.partition("#")[0] or node.module, ""), labels.op(node)
        points.append(Point(c, node.module, kind, op, (times or {}).get(c.cut), c.cut in best, here))

    def few(folding: Folding) -> bool:
        opened = [f for f in root.inside() if folding.is_open(f)]
        return 1 + sum(sum(1 for _ in f.runs()) - 1 for f in opened) <= MOST_BANDS

    bands = tuple(_bands(root, fold(root, "auto", cut=None, fits=few, firsts=False)))
    return Profile(root.call.kind or "model", len(plan.nodes), tuple(points), bands, ends)


def pareto(candidates: Sequence[SplitCandidate], ends: Ends) -> Iterator[SplitCandidate]:
    """The safe cuts that send fewer bytes than the input and every safe cut before them: more in the prefix has to pay.

    Of neighbours that send as much as one another it is the first that ends a module, for whole blocks are easier to name.
    """
    least = ends.input_bytes
    for nbytes, run in groupby((c for c in candidates if c.safe), lambda c: c.boundary_bytes):
        if nbytes < least:
            least, alike = nbytes, list(run)
            yield next((c for c in alike if c.after), alike[0])


def _bands(frame: Frame, folding: Folding) -> Iterator[Band]:
    for run in frame.runs():
        if not isinstance(run, Frame):
            continue
        if folding.is_open(run) and run.frames:
            yield from _bands(run, folding)
        else:
            yield Band(run.call.path, run.call.start, run.call.end)
