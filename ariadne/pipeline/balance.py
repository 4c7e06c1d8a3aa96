"""Balance: where to cut so that the slowest part, with what it sends, is fastest.

Dynamic programming over the usable cuts: the best way to make k parts of the first ops is the best over the last of their
cuts. What
a part costs is a difference of sums, so no op is added up twice; where there are very many cuts, they are thinned out evenly.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import Example, drawn_by, left_as_found
from ariadne.cut import SIDES, Part, SplitCandidate
from ariadne.errors import FrontierError, SpecError
from ariadne.plan import TracePlan
from ariadne.segment import Interpreter

Balance = Literal["time", "parameters", "memory", "boundary_bytes"]
BALANCES = ("time", "parameters", "memory", "boundary_bytes")
SEND = 2e9  # bytes per second that a hop is taken to carry, unless told
_MOST_CUTS = 1500  # of so many a plan for 64 parts takes a second or two
Cuts = tuple[SplitCandidate, ...]


def op_times(model: nn.Module, plan: TracePlan, example: Example, rounds: int = 3) -> list[float]:
    """Seconds that each op of a plan takes here, forward, one after the other; the least of some rounds. The model is left
    as found."""
    best = [float("inf")] * len(plan.nodes)
    batch = example.batch if example.batch in plan.batches else next(iter(plan.batches))
    for _ in range(rounds):
        with left_as_found(model, [plan], drew=drawn_by([plan])):
            leaves = example.resized(batch)
            taken: list[float] = []
            timed = _Timed(
                plan, Part(SIDES[0], 0, len(plan.nodes), tuple(n for _, n in plan.inputs), None), model, taken
            )
            given = [leaves[i] for i, _ in plan.inputs]
            if plan.keeps_inputs:
                given.append(tree.unflatten(leaves, example.spec))
            with torch.no_grad():
                timed(batch, *given)
        best = [min(a, b) for a, b in zip(best, taken, strict=True)]
    return best


class _Timed(Interpreter):
    """The interpreter, with a clock at each op."""

    def __init__(self, plan: TracePlan, part: Part, model: nn.Module, into: list[float]) -> None:
        super().__init__(plan, part, model)
        self.into = into

    def run(self, node: Any, args: Any, kwargs: Any) -> Any:
        """One op."""
        start = time.perf_counter()
        try:
            return super().run(node, args, kwargs)
        finally:
            self.into.append(time.perf_counter() - start)


@dataclass(frozen=True)
class Costs:
    """What each op of a plan costs, and what it costs to send what crosses each cut, in one unit."""

    ops: tuple[float, ...]
    sends: Mapping[int, float]
    unit: str

    @classmethod
    def of(
        cls, by: Balance, model: nn.Module, plan: TracePlan, candidates: Sequence[SplitCandidate], example: Example,
        times: Sequence[float] | None = None, bytes_per_second: float = SEND,
    ) -> Costs:  # fmt: skip
        """By measured time (or `times`, seconds of each op), bytes of parameters, of parameters and activations, or of what
        crosses."""
        if by not in BALANCES:
            raise SpecError(f"balance is one of {', '.join(map(repr, BALANCES))}; found {by!r}")
        batch = example.batch
        crossing = {c.cut: c.boundary_bytes * batch for c in candidates}
        if by == "time":
            found = tuple(times) if times is not None else tuple(op_times(model, plan, example))
            if len(found) != len(plan.nodes):
                raise SpecError(f"times are seconds of each of the {len(plan.nodes)} ops; found {len(found)}")
            return cls(found, {c: n / bytes_per_second for c, n in crossing.items()}, "s")
        if by == "boundary_bytes":
            return cls((0.0,) * len(plan.nodes), crossing, "bytes")
        env = plan.traced | {plan.batch_symbol: batch}
        seen: set[tuple[Any, ...]] = set()
        ops = []
        for node in plan.nodes:
            total = 0.0
            for name in node.reads:
                value = plan.values.get(name)
                if value is not None and value.kind == "parameter" and value.origin not in seen:
                    seen.add(value.origin)
                    total += value.nbytes(env)
            if by == "memory":
                total += sum(plan.values[n].nbytes(env) for n in node.outputs)
            ops.append(total)
        return cls(tuple(ops), dict.fromkeys(crossing, 0.0), "bytes")

    def parts(self, cuts: Sequence[SplitCandidate]) -> list[float]:
        """What each part costs with what it sends."""
        ends = [0, *(c.cut for c in cuts), len(self.ops)]
        sums = [0.0, *accumulate(self.ops)]
        return [sums[b] - sums[a] + self.sends.get(b, 0.0) for a, b in pairwise(ends)]


def balanced(pool: Sequence[SplitCandidate], costs: Costs, count: int) -> Cuts:
    """The cuts, of usable ones, with which the dearest of so many parts is cheapest; of such, those with the least cost in all.

    Takes time as the parts and the square of the cuts, of which at most 1500 are looked at.
    """
    if len(pool) < count - 1:
        raise FrontierError(
            f"the plan has {len(pool)} cut(s) that a pipeline can take, which is not enough for {count} parts; ask for "
            f"{len(pool) + 1} or fewer"
        )
    pool = _thinned(pool, costs, max(_MOST_CUTS, count - 1))
    places = [c.cut for c in pool]
    sums = [0.0, *accumulate(costs.ops)]
    before = torch.tensor([sums[p] for p in places], dtype=torch.float64)  # of the ops up to each cut
    sends = torch.tensor([costs.sends.get(p, 0.0) for p in places], dtype=torch.float64)
    n = len(places)
    # worst[j]: the dearest of k parts that end at cut j, at best; came[k][j]: the cut before
    worst, total = before + sends, before + sends
    between = before[None, :] - before[:, None] + sends[None, :]  # the part from cut i to cut j
    between[torch.tril(torch.ones(n, n, dtype=torch.bool))] = float("inf")
    came: list[torch.Tensor] = []
    for _ in range(count - 2):
        dearest = torch.maximum(worst[:, None], between)
        best = dearest.min(0).values
        sent = torch.where(dearest <= best[None, :], total[:, None] + between, float("inf"))
        total, at = sent.min(0)
        worst = best
        came.append(at)
    last = sums[-1] - before
    dearest = torch.maximum(worst, last)
    ties = torch.where(dearest <= dearest.min(), total + last, float("inf"))
    j = int(ties.argmin())
    found = [j]
    for at in reversed(came):
        j = int(at[j])
        found.append(j)
    return tuple(pool[i] for i in reversed(found))


def _thinned(pool: Sequence[SplitCandidate], costs: Costs, most: int) -> Sequence[SplitCandidate]:
    """At most so many cuts, spread evenly over the costs; of neighbours the one that is cheapest to send."""
    if len(pool) <= most:
        return pool
    sums = [0.0, *accumulate(costs.ops)]
    total, bins = sums[-1] or 1.0, dict[int, SplitCandidate]()
    for i, c in enumerate(pool):
        key = int(sums[c.cut] / total * most) if sums[-1] else int(i / len(pool) * most)
        if key not in bins or costs.sends.get(c.cut, 0.0) < costs.sends.get(bins[key].cut, 0.0):
            bins[key] = c
    return [bins[k] for k in sorted(bins)]


def even(pool: Sequence[SplitCandidate], ops: int, count: int) -> Cuts:
    """The usable cuts nearest to equal numbers of ops."""
    if len(pool) < count - 1:
        raise FrontierError(
            f"the plan has {len(pool)} cut(s) that a pipeline can take, which is not enough for {count} parts; ask for "
            f"{len(pool) + 1} or fewer"
        )
    places, found = [c.cut for c in pool], list[int]()
    for k in range(1, count):
        target, least, most = k * ops / count, found[-1] + 1 if found else 0, len(pool) - (count - k)
        i = bisect_left(places, target)
        near = min((j for j in (i - 1, i) if 0 <= j < len(pool)), key=lambda j: abs(places[j] - target))
        found.append(min(max(near, least), most))
    return tuple(pool[i] for i in found)


@dataclass(frozen=True)
class Layout:
    """A way to cut a plan in parts: the cuts, and what each part costs."""

    name: str
    cuts: Cuts
    parts: tuple[float, ...]
    unit: str

    @property
    def imbalance(self) -> float:
        """The dearest part over the mean of all; 1.0 is even."""
        mean = sum(self.parts) / len(self.parts)
        return max(self.parts) / mean if mean else 1.0


def layouts(pool: Sequence[SplitCandidate], costs: Costs, count: int, by: str) -> list[Layout]:
    """The balanced cuts beside the even ones."""
    makers: list[tuple[str, Callable[[], Cuts]]] = [
        (f"balanced by {by}", lambda: balanced(pool, costs, count)),
        ("even in ops", lambda: even(pool, len(costs.ops), count)),
    ]
    return [Layout(name, cuts := make(), tuple(costs.parts(cuts)), costs.unit) for name, make in makers]
