"""`ariadne bench`: the model against its split, and with `--compile` against compiled code, with break-even."""

from __future__ import annotations

import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
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


@dataclass
class Entrant:
    """One of those that are timed: what making it took, its first calls, then its calls in rounds, in seconds."""

    name: str
    measure: Callable[[int], BenchmarkResult]
    preparation: float = 0.0
    first: tuple[float, ...] = ()
    calls: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def steady(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.calls)


def run(options: Namespace) -> Answer:
    """Time, compare with the eager model, and say when it has paid."""
    subject = load(options)
    entrants: list[Entrant] = subject.owning(lambda: _entrants(subject, options))
    with progress(f"timing {subject.name} ...") as line:
        _first_calls(entrants)
        running = [e for e in entrants if not e.failed]
        order = random.Random(0)
        for number in range(options.rounds):
            line(f"timing {subject.name}: round {number + 1} of {options.rounds}")
            for entrant in order.sample(running, len(running)):
                entrant.calls += entrant.measure(options.iterations).seconds
    eager = next(e for e in entrants if e.name == EAGER)
    noise = abs(next(e for e in entrants if e.name == TWIN).steady / eager.steady - 1)
    rows = [_row(e, eager, max(noise, LEAST_DIFFERENCE)) for e in entrants]
    heads = ["what", ">median ms", ">of eager", ">prepared s", ">first call s", "has paid after"]
    lines = [
        (r["what"], _ms(r["median"]), _ratio(r["ratio"]), _s(r["preparation"]), _s(r["first"]), r["words"])
        for r in rows
    ]
    calls = options.rounds * options.iterations
    notes = [
        f"{subject.name}, batch {subject.batch}, {'training' if options.train else 'eval'} mode, without gradients, "
        f"{torch.get_num_threads()} thread(s): medians of {calls} calls each, in {options.rounds} rounds of random order.",
        "This is one process, so there is no interval: another process may differ by more than these rows do. The eager model, "
        f"timed twice, differs from itself by {noise:.1%}; differences up to {max(noise, LEAST_DIFFERENCE):.1%} are called "
        "none here.",
        "Has paid after n calls: n = (preparation + first calls beyond the steady rate) / what a steady call saves. The first "
        "preparation of a process includes what torch loads for it.",
    ]
    failed = [f"{e.name} failed: {e.failed}" for e in entrants if e.failed]
    data = {"model": subject.name, "batch": subject.batch, "calls": calls, "threads": torch.get_num_threads(),
            "noise": noise, "processes": 1, "rows": rows}  # fmt: skip
    return Answer("\n".join([table(heads, lines), "", *failed, *notes]), data)


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


def _row(e: Entrant, eager: Entrant, least: float) -> dict[str, Any]:
    """One entrant against the eager model; `least` is the difference, as a share, below which there is none."""
    found: dict[str, Any] = {"what": e.name, "preparation": e.preparation, "failed": e.failed, "words": "", "never": False,
                             "median": None, "ratio": None, "first": None, "excess": None, "break_even": None}  # fmt: skip
    if e.failed:
        return found | {"words": "failed"}
    excess = e.preparation + sum(e.first) - len(e.first) * e.steady
    found |= {"median": e.steady, "ratio": e.steady / eager.steady, "first": e.first[0], "excess": excess}
    if e.name in (EAGER, TWIN):
        return found
    if abs(found["ratio"] - 1) <= least:
        return found | {"words": "no difference shown"}
    calls = break_even(excess, eager.steady - e.steady)
    words = "never" if calls is None else f"{math.ceil(calls):,} calls"
    return found | {"break_even": calls, "never": calls is None, "words": words}


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _s(seconds: float | None) -> str:
    return f"{seconds:.2f}" if seconds else ""
