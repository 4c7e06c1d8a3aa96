"""Balance: the dearest part is cheapest, told beside the even cut; what schedules leave idle, before anything runs."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.capture import Example
from ariadne.cut import SplitCandidate, frontiers
from ariadne.errors import FrontierError, SpecError
from ariadne.pipeline import Costs, layouts, prepare_pipeline, usable
from ariadne.pipeline.balance import balanced, even, op_times
from ariadne.pipeline.idle import played
from conformance.unit.pipeline.nets import Normed, SkipOverTwo
from conformance.unit.pipeline.ranks import made


def candidate(cut: int) -> SplitCandidate:
    return SplitCandidate(cut, ("x",), (), 0.0, cut, 0, True, True, "", "")


@pytest.mark.parametrize("count", [2, 3, 4, 6])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_cuts_have_a_cheaper_dearest_part(seed: int, count: int) -> None:
    draw = random.Random(seed)
    ops = tuple(draw.choice([1.0, 2.0, 5.0, 0.5, 9.0]) for _ in range(14))
    pool = [candidate(c) for c in range(1, 14) if draw.random() < 0.8]
    costs = Costs(ops, {c.cut: draw.choice([0.0, 1.0, 4.0]) for c in pool}, "s")
    best = min(max(costs.parts(cuts)) for cuts in itertools.combinations(pool, count - 1))
    assert max(costs.parts(balanced(pool, costs, count))) == pytest.approx(best)


def test_sixty_four_parts_of_ten_thousand_ops_are_planned_in_seconds() -> None:
    draw = random.Random(0)
    costs = Costs(tuple(draw.expovariate(1.0) for _ in range(10_000)), dict.fromkeys(range(1, 10000), 0.01), "s")
    pool = [candidate(c) for c in range(1, 10_000)]
    start = time.monotonic()
    cuts = balanced(pool, costs, 64)
    taken = time.monotonic() - start
    parts = costs.parts(cuts)
    assert len(parts) == 64
    assert max(parts) < 1.15 * sum(parts) / 64 < max(costs.parts(even(pool, 10_000, 64)))
    assert taken < 60  # 10 on an idle machine


def test_fewer_cuts_than_asked_for_are_told() -> None:
    with pytest.raises(FrontierError, match="has 1 cut"):
        balanced([candidate(1)], Costs((1.0, 1.0), {1: 0.0}, "s"), 3)


def test_op_times_are_measured_for_each_op_and_leave_the_model_as_it_was() -> None:
    net, pipeline = made("norm", 2)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    assert isinstance(net, Normed)
    times = op_times(net, pipeline.plan, pipeline.example)
    assert len(times) == len(pipeline.plan.nodes)
    assert min(times) > 0
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_parts_are_balanced_by_what_is_asked_for() -> None:
    class Wide(nn.Module):
        """One layer has nearly all parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 400)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    x = (torch.randn(4, 8),)
    assert prepare_pipeline(Wide(), x, parts=2, balance="parameters").cuts[0].cut == 3
    assert prepare_pipeline(Wide(), x, parts=2).cuts[0].cut == 2
    given: Any = [10.0, 1.0, 1.0, 1.0]
    assert prepare_pipeline(Wide(), x, parts=2, balance="time", times=given).cuts[0].cut == 1
    assert prepare_pipeline(Wide(), x, parts=2, balance="memory").cuts[0].cut == 3
    with pytest.raises(SpecError, match="balance is one of"):
        prepare_pipeline(Wide(), x, parts=2, balance="speed")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="seconds of each of the 4 ops"):
        prepare_pipeline(Wide(), x, parts=2, balance="time", times=[1.0])


def test_the_balanced_cuts_stand_beside_the_even_ones() -> None:
    _, pipeline = made("skip", 2)
    net, plan = SkipOverTwo(), pipeline.plan
    candidates = frontiers(plan)
    costs = Costs.of("boundary_bytes", net, plan, candidates, Example.of((torch.randn(4, 6),), {}))
    one, other = layouts(usable(plan, candidates), costs, 3, "boundary_bytes")
    assert (one.name, other.name) == ("balanced by boundary_bytes", "even in ops")
    assert max(one.parts) <= max(other.parts)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("parts", "microbatches"), [(2, 4), (4, 8), (4, 4)])
def test_idle_shares_are_those_of_the_textbook(name: str, parts: int, microbatches: int) -> None:
    found = played(name, [1.0] * parts, microbatches)
    assert found.ranks == parts
    assert found.seconds == 3.0 * (microbatches + parts - 1)
    assert found.idle == pytest.approx((parts - 1) / (microbatches + parts - 1))


def test_schedules_with_less_idle_time_show_less() -> None:
    shares = {n: played(n, [1.0] * 8, 8).idle for n in ("LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble")}
    assert shares["ZBVZeroBubble"] < shares["Interleaved1F1B"] < played("1F1B", [2.0] * 4, 8).idle
    with pytest.raises(SpecError, match="at least as many microbatches"):
        played("DualPipeV", [1.0] * 8, 2)


def test_ranks_that_share_cores_take_longer() -> None:
    alone, shared, one = (played("GPipe", [1.0] * 4, 8, cores=cores) for cores in (None, 2, 1))
    assert alone.seconds == played("GPipe", [1.0] * 4, 8, cores=4).seconds == 33.0
    assert one.seconds == 3.0 * 4 * 8
    assert 0.5 * one.seconds < shared.seconds < one.seconds
