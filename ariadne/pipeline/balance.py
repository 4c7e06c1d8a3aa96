"""Balance: where to cut so that the slowest part, with what it sends, is fastest; and what each schedule leaves idle.

Dynamic programming over the usable cuts: the best way to make k parts of the first ops is the best over the last of their cuts. What
a part costs is a difference of sums, so no op is added up twice; where there are very many cuts, they are thinned out evenly.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Any, Literal

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import Example, Snapshot
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
    """Seconds that each op of a plan takes here, forward, one after the other; the least of some rounds. The model is left as found."""
    best = [float("inf")] * len(plan.nodes)
    batch = example.batch if example.batch in plan.batches else next(iter(plan.batches))
    for _ in range(rounds):
        snapshot = Snapshot(model)
        snapshot.save_written(plan)
        try:
            leaves = example.resized(batch)
            taken: list[float] = []
            timed = _Timed(plan, Part(SIDES[0], 0, len(plan.nodes), tuple(n for _, n in plan.inputs), None), model, taken)
            given = [leaves[i] for i, _ in plan.inputs]
            if plan.keeps_inputs:
                given.append(tree.unflatten(leaves, example.spec))
            with torch.no_grad():
                timed(batch, *given)
        finally:
            snapshot.restore(any(node.seeded for node in plan.nodes))
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
        """By measured time (or `times`, seconds of each op), bytes of parameters, of parameters and activations, or of what crosses."""
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
        env = {plan.batch_symbol: batch}
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
        return [sums[b] - sums[a] + self.sends.get(b, 0.0) for a, b in zip(ends, ends[1:], strict=False)]


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


def idle(name: str, parts: Sequence[float], microbatches: int, backward: float = 2.0) -> float:
    """The share of a step in which ranks wait, if parts take so long forward, and `backward` times that back.

    Played through in the order of the schedule, each action as soon as what it needs is there: GPipe, 1F1B, interleaved, looped,
    and zero-bubble schedules, of which the two walks back take half each; sends are in the parts' costs.
    """
    orders, homes = _orders(name, len(parts), microbatches)
    done: dict[tuple[str, int, int], float] = {}
    clocks, at, busy = [0.0] * len(orders), [0] * len(orders), 0.0
    last, split = len(parts) - 1, any(kind == "W" for order in orders for kind, *_ in order)
    cost = {"F": 1.0, "B": backward / 2 if split else backward, "W": backward / 2}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, part, chunk = order[at[rank]]
                needs = [("F", part - 1, chunk)] if kind == "F" and part else []
                if kind == "B":
                    needs = [("F", part, chunk)] + ([("B", part + 1, chunk)] if part < last else [])
                if any(n not in done for n in needs):
                    break
                start = max([clocks[rank], *(done[n] for n in needs)])
                clocks[rank] = done[kind, part, chunk] = start + parts[part] * cost[kind]
                busy += parts[part] * cost[kind]
                at[rank] += 1
                moved = True
    if any(a < len(o) for a, o in zip(at, orders, strict=True)):
        raise SpecError(f"{name} can't be played through with {len(parts)} parts and {microbatches} micro-batches")
    del homes
    return 1 - busy / (len(orders) * max(clocks)) if max(clocks) else 0.0


def step_time(name: str, parts: Sequence[float], microbatches: int, backward: float = 2.0) -> float:
    """How long a step takes, as `idle` plays it through."""
    share = idle(name, parts, microbatches, backward)
    ranks = len(_orders(name, len(parts), microbatches)[0])
    return sum(parts) * microbatches * (1 + backward) / ranks / (1 - share)


Order = list[tuple[str, int, int]]  # F, B or W; part; micro-batch


def _orders(name: str, parts: int, chunks: int) -> tuple[list[Order], dict[int, int]]:
    """What each rank does under a schedule, in order, and where each part lives."""
    key = name.lower()
    if key in ("gpipe", "1f1b"):
        homes = {i: i for i in range(parts)}
        return [_single(key, i, parts, chunks) for i in range(parts)], homes
    if parts % 2:
        raise SpecError(f"{name} runs two parts on each rank here: an even number of parts is needed; found {parts}")
    ranks = parts // 2
    if key in ("zbvzerobubble", "dualpipev"):
        homes = {i: min(i, parts - 1 - i) for i in range(parts)}
    else:
        homes = {i: i % ranks for i in range(parts)}
    if key == "loopedbfs":
        mine = [[p for p in range(parts) if homes[p] == r] for r in range(ranks)]
        forward = [[("F", p, c) for p in ps for c in range(chunks)] for ps in mine]
        back = [[("B", p, c) for p in reversed(ps) for c in reversed(range(chunks))] for ps in mine]
        return [f + b for f, b in zip(forward, back, strict=True)], homes
    return _greedy(homes, parts, ranks, chunks, key != "interleaved1f1b"), homes


def _single(key: str, part: int, parts: int, chunks: int) -> Order:
    if key == "gpipe":
        return [("F", part, c) for c in range(chunks)] + [("B", part, c) for c in range(chunks)]
    ahead = min(chunks, parts - part)
    order: Order = [("F", part, c) for c in range(ahead)]
    for c in range(chunks):
        order.append(("B", part, c))
        if c + ahead < chunks:
            order.append(("F", part, c + ahead))
    return order


def _greedy(homes: Mapping[int, int], parts: int, ranks: int, chunks: int, split: bool) -> list[Order]:
    """Back before forward, walks to parameters where nothing else is ready, and no more in flight than there are parts."""
    done: set[tuple[str, int, int]] = set()
    orders: list[Order] = [[] for _ in range(ranks)]
    todo = {(k, p, c) for k in ("FBW" if split else "FB") for p in range(parts) for c in range(chunks)}
    while todo:
        now = []
        for rank in range(ranks):
            flight = sum(k == "F" for k, *_ in orders[rank]) - sum(k == "B" for k, *_ in orders[rank])
            ready = []
            for kind, p, c in todo:
                if homes[p] != rank:
                    continue
                before = {"F": [("F", p - 1, c)] if p else [], "W": [("B", p, c)]}.get(
                    kind, [("F", p, c), *([("B", p + 1, c)] if p < parts - 1 else [])]
                )
                if all(b in done for b in before) and not (kind == "F" and p == homes[p] and flight >= 2 * parts):
                    ready.append(((("B", "F", "W").index(kind), -p if kind == "F" else p, c), (kind, p, c)))
            if ready:
                now.append((rank, min(ready)[1]))
        if not now:
            break
        for rank, action in now:
            orders[rank].append(action)
            done.add(action)
            todo.discard(action)
    return orders


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


def enough(count: int, name: str) -> int:
    """How many micro-batches a schedule needs at least for so many parts, and a usual number more."""
    del name
    return max(count, ceil(2 * count))
