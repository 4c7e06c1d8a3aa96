"""What the benchmarks conclude from samples, held against tables and against simulations whose truth is known."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from benchmarks import break_even as be
from benchmarks.statistics import (
    TooFewSamplesError,
    compare,
    geometric_mean,
    interval,
    percentile,
    ratio_of_pairs,
    samples_needed,
    student_cdf,
    student_quantile,
)

# Abramowitz and Stegun, table 26.10
TABLE = {
    (0.975, 1): 12.706,
    (0.975, 2): 4.303,
    (0.975, 3): 3.182,
    (0.975, 4): 2.776,
    (0.975, 5): 2.571,
    (0.975, 9): 2.262,
    (0.975, 30): 2.042,
    (0.975, 120): 1.980,
    (0.95, 4): 2.132,
    (0.995, 7): 3.499,
}


@pytest.mark.parametrize(("where", "t"), TABLE.items())
def test_students_quantiles_are_those_of_the_tables(where: tuple[float, int], t: float) -> None:
    assert student_quantile(*where) == pytest.approx(t, abs=6e-4)
    assert student_quantile(1 - where[0], where[1]) == pytest.approx(-t, abs=6e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 50])
def test_the_quantile_is_the_inverse_of_the_distribution(freedom: int) -> None:
    assert student_cdf(0.0, freedom) == 0.5
    for p in (0.01, 0.3, 0.5, 0.8, 0.99):
        assert student_cdf(student_quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-12)


def test_an_interval_over_one_process_has_no_bounds() -> None:
    assert interval([3.0]) == be.Interval(3.0, -math.inf, math.inf)
    with pytest.raises(TooFewSamplesError, match="at least one process; found none"):
        interval([])


def test_tail_percentiles_take_as_many_samples_as_mlperf_wants() -> None:
    assert (samples_needed(0.9), samples_needed(0.99)) == (64, 662)
    assert percentile(range(1, 65), 0.9) == 58
    with pytest.raises(TooFewSamplesError, match="p90 takes at least 64 samples; found 63"):
        percentile(range(63), 0.9)
    assert percentile(range(1, 663), 0.99) == 656
    with pytest.raises(TooFewSamplesError, match="p99 takes at least 662 samples; found 661"):
        percentile(range(661), 0.99)


def test_a_process_is_the_median_of_its_pairs() -> None:
    assert ratio_of_pairs([1.0, 2.0, 900.0], [2.0, 4.0, 1.0]) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        ratio_of_pairs([1.0, 2.0], [1.0])


QUIET = [1.001, 0.999, 1.002, 0.998, 1.0]


@pytest.mark.parametrize(
    ("ratios", "noise", "verdict", "reason"),
    [
        ([0.90, 0.91, 0.89, 0.90, 0.92], QUIET, "faster", ""),
        ([1.10, 1.11, 1.09, 1.10, 1.12], QUIET, "slower", ""),
        ([0.90, 0.91, 0.89, 0.90], QUIET[:4], "no difference shown", "4 of at least 5 processes"),
        ([0.985, 0.986, 0.984, 0.985, 0.985], QUIET, "no difference shown", "within 2%"),
        ([0.90, 0.91, 0.89, 0.90, 0.92], [1.0, 1.0, 0.85, 1.0, 1.0], "no difference shown", "noise floor of 17.6%"),
        ([0.70, 1.30, 0.80, 0.90, 0.95], QUIET, "no difference shown", "the interval holds 1"),
    ],
)
def test_a_difference_counts_only_beyond_noise_two_percent_and_its_interval(
    ratios: list[float], noise: list[float], verdict: str, reason: str
) -> None:
    found = compare(ratios, noise)
    assert found.verdict == verdict
    assert reason in found.reason
    assert bool(found.reason) == (verdict == "no difference shown")


def test_without_a_noise_pair_nothing_is_said() -> None:
    with pytest.raises(TooFewSamplesError, match="needs an eager-against-eager pair"):
        compare([0.5] * 5, [])


def test_the_geometric_mean_tells_which_models_it_leaves_out() -> None:
    results = {"a": dict.fromkeys(range(3), 0.5), "b": dict.fromkeys(range(4), 2.0), "c": "CompileError: no"}
    found = geometric_mean(results)
    assert found.ratio is not None
    assert (found.ratio.estimate, found.n, found.total, found.processes) == (pytest.approx(1.0), 2, 3, 3)
    assert found.failures == {"c": "CompileError: no"}
    assert geometric_mean({"c": "no"}).ratio is None


def test_the_geometric_mean_takes_the_processes_that_all_models_have() -> None:
    found = geometric_mean({"a": {0: 9.0, 1: 0.5, 2: 0.5}, "b": {1: 2.0, 2: 2.0, 3: 9.0}})
    assert found.ratio is not None
    assert (found.ratio.estimate, found.processes) == (pytest.approx(1.0), 2)
    apart = geometric_mean({"a": {0: 0.5}, "b": {1: 0.5}})
    assert (apart.ratio, apart.n, apart.failures["a"]) == (None, 0, "no process has all of the models")


# --- break-even -------------------------------------------------------------------------------------------------------


def test_the_excess_counts_preparation_and_every_call_before_steady_state() -> None:
    assert be.excess(2.0, [10.0, 1.0, 5.0, 1.0], steady=1.0) == 2.0 + 9.0 + 4.0


def test_the_verdicts() -> None:
    costs = [10.0, 10.2, 9.8, 10.1, 9.9]
    gains = be.break_even(costs, [0.10, 0.11, 0.09, 0.10, 0.10])
    assert gains.verdict == "between"
    assert gains.low < 100 < gains.high
    assert gains.words() == f"between {math.ceil(gains.low)} and {math.ceil(gains.high)} calls"
    assert be.break_even(costs, [0.1, -0.1, 0.05, -0.04, 0.0]).words() == (
        "not shown (the interval of the saving holds zero)"
    )
    assert be.break_even(costs, [-0.10, -0.11, -0.09, -0.10, -0.10]).words() == "never"
    assert be.break_even(costs[:4], [0.1] * 4).words() == "not shown (4 of at least 5 processes)"
    assert be.break_even([1.0, -1.0, 0.5, -0.5, 0.1], [0.1] * 5).reason == "the cost is not clear of zero"
    assert be.break_even([-1.0, -1.1, -0.9, -1.0, -1.0], [0.1, 0.11, 0.1, 0.1, 0.1]).words() == ("from the first call")


def test_a_saving_within_the_noise_or_two_percent_is_not_shown() -> None:
    gains = be.break_even([10.0, 10.2, 9.8, 10.1, 9.9], [0.10, 0.11, 0.09, 0.10, 0.10])
    assert gains.verdict == "between"
    never = be.break_even([10.0, 10.2, 9.8, 10.1, 9.9], [-0.10, -0.11, -0.09, -0.10, -0.10])
    loud = [1.0, 1.0, 0.85, 1.0, 1.0]
    assert be.held_against(QUIET, [0.9] * 5, gains) == gains
    assert be.held_against(QUIET, [1.1] * 5, never) == never
    assert be.held_against(loud, [0.9] * 5, gains).words() == (
        "not shown (the saving is within the noise floor of 17.6%)"
    )
    assert be.held_against(loud, [1.1] * 5, never).verdict == "not shown"
    assert be.held_against(QUIET, [0.985] * 5, gains).words() == "not shown (the saving is within 2%)"
    assert be.held_against([], [0.5] * 5, gains).reason == "no eager-against-eager pair to hold the saving against"
    few = be.break_even([10.0], [0.1])
    assert be.held_against(loud, [0.9], few) == few


def test_seconds_are_calls_at_eagers_pace() -> None:
    costs, savings = [10.0, 10.2, 9.8, 10.1, 9.9], [0.10, 0.11, 0.09, 0.10, 0.10]
    calls, seconds = be.break_even(costs, savings), be.break_even_seconds(costs, savings, [0.5] * 5)
    assert (seconds.low, seconds.high) == (pytest.approx(calls.low * 0.5), pytest.approx(calls.high * 0.5))


def test_the_curve_crosses_zero_at_the_bounds() -> None:
    costs, savings = [10.0, 10.2, 9.8, 10.1, 9.9], [0.10, 0.11, 0.09, 0.10, 0.10]
    found = be.break_even(costs, savings)
    low, high = math.ceil(found.low), math.ceil(found.high)
    balance = dict(be.curve(costs, savings, [low - 1, low, high - 1, high]))
    assert balance[low - 1].high < 0 <= balance[low].high
    assert balance[high - 1].low < 0 <= balance[high].low


def test_the_grid_reaches_beyond_its_last_number() -> None:
    points = be.grid(1234)
    assert points[0] == 1
    assert points == sorted(set(points))
    assert points[-1] >= 1234


# --- simulations: 5 processes of 30 pairs, whose true cost and saving are known ------------------------------------------

Summary = tuple[list[float], list[list[float]]]
RUNS, PROCESSES, PAIRS, COST = 3000, 5, 30, 20.0


def simulated(rng: random.Random, saving: float) -> Summary:
    """Each process's cost, and its savings pair by pair: processes differ among each other more than pairs do."""
    costs = [rng.gauss(COST, 0.1 * COST) for _ in range(PROCESSES)]
    own = [rng.gauss(saving, 0.02) for _ in range(PROCESSES)]
    return costs, [[rng.gauss(s, 0.04) for _ in range(PAIRS)] for s in own]


def over_processes(costs: list[float], pairs: list[list[float]]) -> be.BreakEven:
    return be.break_even(costs, [statistics.fmean(p) for p in pairs])


def pooled(costs: list[float], pairs: list[list[float]]) -> be.BreakEven:
    """What must not be done: every pair as if it were a process of its own."""
    return be.break_even([c for c in costs for _ in range(PAIRS)], [s for p in pairs for s in p])


def positive_bootstrap(rng: random.Random) -> Callable[[list[float], list[list[float]]], be.BreakEven]:
    """What must not be done either: a bootstrap over the processes that keeps only the draws that save."""

    def judge(costs: list[float], pairs: list[list[float]]) -> be.BreakEven:
        savings = [statistics.fmean(p) for p in pairs]
        found = []
        for _ in range(100):
            drawn = rng.choices(range(PROCESSES), k=PROCESSES)
            saved = sum(savings[i] for i in drawn)
            if saved > 0:
                found.append(sum(costs[i] for i in drawn) / saved)
        if not found:
            return be.BreakEven("never")
        found.sort()
        return be.BreakEven("between", low=found[len(found) // 40], high=found[-1 - len(found) // 40])

    return judge


def shares(judge: Callable[..., be.BreakEven], saving: float, runs: int = RUNS) -> tuple[float, float]:
    """Over simulated runs: in how many the interval holds the truth, in how many a finite n is claimed."""
    rng = random.Random(20)
    held = finite = 0
    for _ in range(runs):
        found = judge(*simulated(rng, saving))
        finite += found.verdict == "between"
        held += found.rate is not None and saving / COST in found.rate
    return held / runs, finite / runs


@pytest.mark.parametrize("saving", [0.1, 0.05, 0.02, 0.0])
def test_the_interval_holds_the_truth_as_often_as_it_says(saving: float) -> None:
    held, _ = shares(over_processes, saving)
    assert 0.935 <= held <= 0.965


def test_where_nothing_is_saved_a_finite_number_is_hardly_ever_claimed() -> None:
    _, finite = shares(over_processes, 0.0)
    assert 0.01 <= finite <= 0.04  # 2.5 % by design


def test_where_much_is_saved_a_finite_number_is_claimed() -> None:
    _, finite = shares(over_processes, 0.2, runs=200)
    assert finite > 0.99


def test_the_simulation_notices_pairs_that_are_pooled_as_if_independent() -> None:
    held, _ = shares(pooled, 0.1, runs=200)
    assert held < 0.85
    _, finite = shares(pooled, 0.0, runs=200)
    assert finite > 0.1


def test_the_simulation_notices_a_bootstrap_that_keeps_only_savings() -> None:
    _, finite = shares(positive_bootstrap(random.Random(7)), 0.0, runs=200)
    assert finite > 0.9
