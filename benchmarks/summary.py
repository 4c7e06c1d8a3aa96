"""Results as text: tables with intervals and verdicts, failures beside them, and the conditions above."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.findings import (
    Compiled,
    Mean,
    Place,
    Speed,
    Start,
    means,
    recompilations,
    speeds,
    starts,
    versus,
    versus_each,
    versus_faster,
)
from benchmarks.records import Records
from benchmarks.statistics import Comparison, Interval
from benchmarks.tables import table
from benchmarks.variants import AHEAD, COMPILE, DEFAULT, EAGER, NOISE


def text(records: Records) -> str:
    """All tables, as Markdown."""
    return "\n".join(_parts(records))


def _parts(records: Records) -> Iterator[str]:
    for environment in records.environments.values():
        facts = environment.facts
        gpu = f", {facts['gpu']}" if "gpu" in facts else ""
        yield (
            f"environment {environment.id}, {environment.date}: torch {facts['torch']}, Python {facts['python']}, "
            f"{facts['cpu']}, {facts['cores']} cores{gpu}; {facts['option threads']} thread(s), {facts['option pairs']} rounds"
        )
    if not records.samples:
        yield "no samples yet"
        return
    found = speeds(records)
    head = ["task", "model", "batch", "variant", "ms", "p90, p99", "over model(x)", "95 %", "noise", "verdict"]
    yield table("Steady state, side by side", head, [_speed(s) for s in found])
    head = ["task", "batch", "variant", "over model(x)", "95 %", "models", "without a value"]
    yield table("Geometric means", head, [_mean(m) for m in means(found)])
    measured = {s.variant for s in found}
    if COMPILE in measured and (ours := [name for name in ("compiled", AHEAD, DEFAULT) if name in measured]):
        each = [s for name in ours for s in versus_each(records, name, COMPILE)]
        head = ["task", "model", "batch", "variant", "ratio", "95 %", "noise", "verdict"]
        yield table(f"Compiled split over {COMPILE}", head, [_against(s) for s in each])
        all_of_them = [m for name in ours for m in versus(records, name, COMPILE)]
        all_of_them += [m for name in ours for m in versus_faster(records, name, (EAGER, COMPILE))]
        head = ["task", "batch", "variant", "ratio", "95 %", "models", "without a value"]
        yield table(f"Geometric means over {COMPILE}", head, [_mean(m) for m in all_of_them])
    graphs = [
        [p.task, str(p.model), name, ", ".join(f"batch {b}: {_compiled(c)}" for b, c in by_batch.items())]
        for p, name, by_batch in recompilations(records)
    ]
    if graphs:
        yield table("Graphs compiled, batch after batch", ["task", "model", "variant", "graphs"], graphs)
    costs = starts(records)
    if costs:
        head = [
            "task",
            "model",
            "batch",
            "variant",
            "cache",
            "prepare s",
            "first call s",
            "cost X s",
            "saved per call ms",
        ]
        head += ["paid back after", "in eager seconds", "recompiled", "processes"]
        yield table("Costs at the start, and break-even against model(x)", head, [_start(s) for s in costs])
        head = ["task", "model", "batch", "variant", "cache", "imports s", "most memory MiB", "tensors of a call MiB"]
        yield table("Imports and memory", head, [_memory(s) for s in costs if s.failure is None])
    for s in found:
        if s.off:
            yield f"\n{s.variant} on {s.place.model} at batch {s.place.batch} is off from the model by {s.strayed:.1e}"


def _mean(mean: Mean) -> list[str]:
    g = mean.geomean
    value, bounds = _ratio(g.ratio) if g.ratio is not None else ("", "")
    failures = "; ".join(f"{name}: {why}" for name, why in g.failures.items())
    return [mean.place.task, str(mean.place.batch), mean.variant, value, bounds, f"{g.n} of {g.total}", failures]


def _compiled(c: Compiled) -> str:
    return f"{c.graphs} ({c.again} again)" if c.again else str(c.graphs)


def _where(place: Place) -> list[str]:
    return [place.task, str(place.model), str(place.batch)]


def _speed(s: Speed) -> list[str]:
    if s.failure is not None or s.seconds is None:
        return [*_where(s.place), s.variant, "", "", "", "", "", s.failure or ""]
    tails = ", ".join("too few" if t is None else f"{1e3 * t:.3f}" for t in (s.p90, s.p99))
    head = [*_where(s.place), s.variant, f"{1e3 * s.seconds:.3f}", tails]
    if s.against_model is None:
        return [*head, "1", "", "", ""]
    return [*head, *_judged(s.against_model, s.variant)]


def _against(s: Speed) -> list[str]:
    judged = ["", "", "", s.failure or ""] if s.against_model is None else _judged(s.against_model, s.variant)
    return [*_where(s.place), s.variant, *judged]


def _judged(c: Comparison, variant: str) -> list[str]:
    verdict = "the noise itself" if variant == NOISE else f"{c.verdict} ({c.reason})" if c.reason else c.verdict
    return [*_ratio(c.ratio), f"{c.floor:.1%}", verdict]


def _start(s: Start) -> list[str]:
    head = [*_where(s.place), s.variant, s.cache]
    if s.failure is not None:
        return [*head, "", "", "", "", s.failure, "", "", ""]
    paid = ["", ""] if s.calls is None or s.seconds is None else [s.calls.words(), s.seconds.words("s")]
    times = [_interval(s.prepare), _interval(s.first_call), _interval(s.cost), _interval(s.saving, 1e3)]
    return [*head, *times, *paid, str(s.recompilations), str(s.processes)]


def _memory(s: Start) -> list[str]:
    imports = ", ".join(f"{name} {seconds:.2f}" for name, seconds in (s.imports or {}).items())
    rss = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in (s.rss_bytes or {}).items())
    size = "" if s.tensor_peak_bytes is None else f"{s.tensor_peak_bytes / 2**20:.3g}"
    return [*_where(s.place), s.variant, s.cache, imports, rss, size]


def _interval(value: Interval | None, scale: float = 1.0) -> str:
    if value is None:
        return ""
    words = f"{value.estimate * scale:.3g}"
    return words if math.isinf(value.low) else f"{words} ({value.low * scale:.3g} to {value.high * scale:.3g})"


def _ratio(value: Interval) -> tuple[str, str]:
    unbounded = value.high == math.inf
    return f"{value.estimate:.3f}", "" if unbounded else f"{value.low:.3f} to {value.high:.3f}"
