"""`ariadne bench`: the model against its split, and with `--compile` against compiled code, with break-even."""

from __future__ import annotations

import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne.benchmark import BenchmarkResult, measure_forward, measure_split
from ariadne.cli.options import boundary
from ariadne.cli.output import Answer, progress, table
from ariadne.cli.subject import Subject, load
from ariadne.errors import CompileError

EAGER, TWIN = "model, eager", "model, eager, again"
FIRST_CALLS = 3
LEAST_DIFFERENCE = 0.02
NARROW = 0.01  # an interval that reaches no farther than this from its median


@dataclass
class Entrant:
    """One of those that are timed: what making it took, its first calls, then its calls round by round, in seconds."""

    name: str
    measure: Callable[[int], BenchmarkResult]
    preparation: float = 0.0
    first: tuple[float, ...] = ()
    rounds: list[float] = field(default_factory=list)  # the median call of each
    failed: str = ""

    @property
    def steady(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Ratio:
    """Times over the eager model's in the same rounds: their median, and the interval that holds it at 95 %."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """From the median to the farther end, as a share."""
        return max(self.high - self.median, self.median - self.low)

    def verdict(self, floor: float) -> str:
        """Beyond the floor: `faster` or `slower`; else nothing is claimed."""
        return "faster" if self.high < 1 - floor else "slower" if self.low > 1 + floor else ""


def ratio(of: Sequence[float], to: Sequence[float]) -> Ratio:
    """The ratio of two that ran in the same rounds; the interval is that of order statistics, which assumes no distribution.

    >>> ratio([2.0, 2.2, 1.8], [1.0, 1.0, 1.0])
    Ratio(median=2.0, low=1.8, high=2.2)
    """
    found = sorted(a / b for a, b in zip(of, to, strict=True))
    n, tail, k = len(found), 0.0, 0
    while k < (n - 1) // 2 and tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    return Ratio(statistics.median(found), found[max(0, k - 1)], found[min(n - 1, n - k)])


def run(options: Namespace) -> Answer:
    """Time, compare with the eager model, and say when it has paid."""
    subject = load(options)
    entrants: list[Entrant] = subject.owning(lambda: _entrants(subject, options))
    with progress(f"timing {subject.name} ...") as line:
        _first_calls(entrants)
        running = [e for e in entrants if not e.failed]
        eager = next(e for e in running if e.name == EAGER)
        _rounds(running, eager, options, lambda words: line(f"timing {subject.name}: {words}"))
    twin = next(e for e in running if e.name == TWIN)
    apart = ratio(twin.rounds, eager.rounds)
    floor = max(LEAST_DIFFERENCE, 1 - apart.low, apart.high - 1)
    rows = [_row(e, eager, floor) for e in entrants]
    heads = ["what", ">median ms", ">of eager", "95 % interval", ">prepared s", ">first call s", "has paid after"]
    lines = [
        (r["what"], _ms(r["median"]), _ratio(r["ratio"]), _interval(r["interval"]), _s(r["preparation"]), _s(r["first"]),
         r["words"])
        for r in rows
    ]  # fmt: skip
    count = len(eager.rounds)
    notes = [
        f"{subject.name}, batch {subject.batch}, {'training' if options.train else 'eval'} mode, without gradients, "
        f"{torch.get_num_threads()} thread(s): {count} rounds in random order, of {options.iterations} calls each.",
        f"The eager model, timed twice in the same rounds, differs from itself by {floor:.1%} at most: nothing is claimed within "
        "that. This is one process; another may differ by more.",
        "Has paid after n calls: n = (preparation + first calls beyond the steady rate) / what a steady call saves. The first "
        "preparation of a process includes what torch loads for it.",
    ]
    failed = [f"{e.name} failed: {e.failed}" for e in entrants if e.failed]
    data = {"model": subject.name, "batch": subject.batch, "rounds": count, "calls": count * options.iterations,
            "threads": torch.get_num_threads(), "noise": floor, "processes": 1, "rows": rows}  # fmt: skip
    return Answer("\n".join([table(heads, lines), "", *failed, *notes]), data)


def _rounds(running: list[Entrant], eager: Entrant, options: Namespace, line: Callable[[str], None]) -> None:
    """Rounds of all, each in another order, until every interval is narrow, or the time is up."""
    order, end = random.Random(0), time.perf_counter() + options.seconds
    while True:
        number = len(eager.rounds) + 1
        line(f"round {number}")
        for entrant in order.sample(running, len(running)):
            entrant.rounds.append(statistics.median(entrant.measure(options.iterations).seconds))
        if number >= options.rounds:
            wide = max(ratio(e.rounds, eager.rounds).width for e in running if e is not eager)
            if wide <= NARROW or time.perf_counter() >= end:
                return


def _entrants(subject: Subject, options: Namespace) -> list[Entrant]:
    """The eager model, twice, and each way of running it that was asked for."""
    model, args, given = subject.model, subject.args, {"example_kwargs": subject.kwargs}

    def forward(of: Any) -> Callable[[int], BenchmarkResult]:
        return lambda n: measure_forward(of, args, iterations=n, warmup=0, **given)

    found = [Entrant(EAGER, forward(model)), Entrant(TWIN, forward(model))]
    for kind in dict.fromkeys([options.mode, *(["compiled"] if options.compile else [])]):
        start = time.perf_counter()
        runtime = subject.prepared(boundary(options.split), mode=kind)
        took = time.perf_counter() - start

        def split(n: int, of: Any = runtime) -> BenchmarkResult:
            return measure_split(of, args, iterations=n, warmup=0, **given)

        found.append(Entrant(f"split at {runtime.split_id}, {kind}", split, took))
    if options.compile:
        found.append(Entrant("torch.compile(model)", forward(torch.compile(model))))
    return found


def _first_calls(entrants: list[Entrant]) -> None:
    """Time the first calls of each; what a compiler refuses is left out, with its words."""
    for e in entrants:
        with progress(f"first calls: {e.name} ..."):
            try:
                e.first = e.measure(FIRST_CALLS).seconds
            except (CompileError, torch._dynamo.exc.TorchDynamoException) as error:
                e.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def break_even(cost: float, saving: float) -> float | None:
    """After how many calls a cost in seconds is paid back by what each call saves; None where that is never.

    >>> break_even(2.0, 0.5)
    4.0
    """
    return max(0.0, cost) / saving if saving > 0 else None


def _row(e: Entrant, eager: Entrant, floor: float) -> dict[str, Any]:
    """One entrant against the eager model; `floor` is the difference, as a share, below which nothing is claimed."""
    found: dict[str, Any] = {"what": e.name, "preparation": e.preparation, "failed": e.failed, "words": "", "never": False,
                             "median": None, "ratio": None, "interval": None, "first": None, "excess": None,
                             "break_even": None}  # fmt: skip
    if e.failed:
        return found | {"words": "failed"}
    excess = e.preparation + sum(e.first) - len(e.first) * e.steady
    found |= {"median": e.steady, "first": e.first[0], "excess": excess}
    if e is eager:
        return found | {"ratio": 1.0}
    beside = ratio(e.rounds, eager.rounds)
    found |= {"ratio": beside.median, "interval": [beside.low, beside.high]}
    if e.name == TWIN:
        return found
    verdict = beside.verdict(floor)
    if not verdict:
        return found | {"words": "no difference shown"}
    calls = break_even(excess, eager.steady * (1 - beside.median))
    words = "never" if calls is None else f"{math.ceil(calls):,} calls"
    return found | {"break_even": calls, "never": calls is None, "words": words}


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _s(seconds: float | None) -> str:
    return f"{seconds:.2f}" if seconds else ""
