"""The whole zoo's speed in eager mode: one figure, how it is spread, and why each model is above 1.02 that is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import environment
from benchmarks.findings import Mean, Place, Speed, means, speeds
from benchmarks.parts import cause
from benchmarks.records import Records, append, read
from benchmarks.runner import Options, Runner
from benchmarks.statistics import Interval
from benchmarks.tables import table

VARIANT = "generated"
SLOW = 1.02
LEAST = 50  # models, of which it takes so many to speak of a zoo
EDGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, SLOW)


@dataclass(frozen=True)
class Zoo:
    """The split's time over the model's at one batch, for all models that have a value; `causes` by model."""

    place: Place
    mean: Mean
    models: Sequence[Speed]
    causes: dict[str, str]

    @property
    def slow(self) -> list[Speed]:
        """The models above 1.02, the slowest first."""
        return sorted((s for s in self.models if estimate(s) > SLOW), key=estimate, reverse=True)

    def quantile(self, share: float) -> float:
        """The ratio at or below which this share of the models lies."""
        ordered = sorted(map(estimate, self.models))
        return ordered[max(0, min(len(ordered) - 1, round(share * len(ordered)) - 1))]

    def spread(self) -> list[tuple[str, int]]:
        """How many models lie between one edge and the next."""
        ratios = list(map(estimate, self.models))
        bounds = [(0.0, EDGES[0]), *pairwise(EDGES), (EDGES[-1], float("inf"))]
        words = [f"up to {EDGES[0]:g}", *(f"{a:g} to {b:g}" for a, b in bounds[1:-1]), f"above {EDGES[-1]:g}"]
        return [(word, sum(a < r <= b for r in ratios)) for word, (a, b) in zip(words, bounds, strict=True)]

    def words(self) -> str:
        """The figure, in a sentence."""
        found = self.mean.geomean
        value = "no process has measured all of them yet" if found.ratio is None else _interval(found.ratio)
        tenths = ", ".join(f"{self.quantile(share):.2f}" for share in (0.1, 0.5, 0.9))
        return (
            f"Geometric mean over {len(self.models)} of {found.total} models: {value}. A tenth, half and nine tenths of them "
            f"lie at or below {tenths}; {len(self.slow)} above {SLOW:g}."
        )


def estimate(speed: Speed) -> float:
    """A model's ratio: the geometric mean over its processes."""
    return statistics.geometric_mean(speed.ratios.values())


def zoos(records: Records, least: int = LEAST) -> Iterator[Zoo]:
    """What the records say of the zoo, for each batch at which at least so many models were measured."""
    found = speeds(records)
    causes = {
        (s["environment"], s["device"], s["batch"], s["model"]): cause(s["seconds"])
        if s["status"] == "ok"
        else f"not profiled: {s['reason']}"
        for s in records.of("parts")
    }
    for mean in means(found):
        p = mean.place
        if mean.variant != VARIANT or p.task != "inference":
            continue
        here = [s for s in found if s.place.overall == p and s.variant == VARIANT and s.failure is None]
        if len(here) >= least:
            known = {m: why for (e, d, b, m), why in causes.items() if (e, d, b) == (p.environment, p.device, p.batch)}
            yield Zoo(p, mean, here, known)


def text(records: Records, least: int = LEAST) -> str:
    """The figure, the spread and the slow ones, as Markdown; empty where there are too few models."""
    lines = []
    for zoo in zoos(records, least):
        lines.append(f"\n## The whole zoo, eager, batch {zoo.place.batch}: split over model\n\n{zoo.words()}")
        most = max(n for _, n in zoo.spread())
        lines.append(
            table(
                "How it is spread",
                ["ratio", "models", ""],
                [[w, str(n), "#" * round(40 * n / most)] for w, n in zoo.spread()],
            )
        )
        if zoo.slow:
            lines.append(
                table(
                    f"Above {SLOW:g}, and why", ["model", "ms", "ratio", "95 %", "why"], [*map(zoo_row(zoo), zoo.slow)]
                )
            )
    return "\n".join(lines)


def zoo_row(zoo: Zoo) -> Callable[[Speed], list[str]]:
    """What makes a row of a model that is slow."""

    def row(s: Speed) -> list[str]:
        against = s.against_model.ratio if s.against_model is not None else None
        bounds = "" if against is None or against.high == float("inf") else f"{against.low:.2f} to {against.high:.2f}"
        model = str(s.place.model)
        return [
            model,
            f"{1e3 * (s.seconds or 0):.3g}",
            f"{estimate(s):.3f}",
            bounds,
            zoo.causes.get(model, "not profiled"),
        ]

    return row


def run(options: Options, output: Path, progress: Callable[[str], None]) -> int:
    """Measure what the file does not hold yet, then profile what is above 1.02; how many results are failures."""
    runner = Runner(options, output, progress)
    failed = runner.run()
    records = read(output)
    here = {s["environment"] for s in runner.done.values()}
    known = {(s["environment"], s["model"], s["batch"]) for s in records.of("parts") if s["status"] == "ok"}
    slow = [
        s
        for s in speeds(records)
        if s.variant == VARIANT and s.failure is None and s.place.environment in here and estimate(s) > SLOW
    ]
    for s in slow:
        p = s.place
        if (p.environment, p.model, p.batch) in known:
            continue
        progress(f"profiled, since its ratio is {estimate(s):.3f}: {p.model}, batch {p.batch} …")
        with TemporaryDirectory(prefix="ariadne-parts-") as folder:
            moment = environment.moment()
            found = runner.alone("parts", str(p.model), Path(folder), options.timeout, batches=(p.batch,))
        done = [r for r in found if r["task"] == "inference"]
        base = {"job": "parts", "environment": p.environment, "variant": VARIANT, "batch": p.batch, "process": 0}
        append(output, [{**base, **moment, **r} for r in done])
        told = [cause(r["seconds"]) if r["status"] == "ok" else r["reason"] for r in done]
        progress(f"{p.model}, batch {p.batch}: {'; '.join(told)}")
    return failed


def _interval(value: Interval) -> str:
    unbounded = value.high == float("inf")
    return f"{value.estimate:.3f}" + ("" if unbounded else f" (95 %: {value.low:.3f} to {value.high:.3f})")
