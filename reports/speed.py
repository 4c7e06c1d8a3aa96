"""Speeds at steady state, side by side with the model: for inference one section, for training another."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.findings import STRAYED, Compiled, Mean, Place, Speed
from benchmarks.statistics import LEAST_DIFFERENCE, doubt
from benchmarks.variants import EAGER, NOISE
from reports import charts
from reports.document import Block, Cell, Figure, Figures, Prose, Section, Table, cells, not_measured
from reports.words import one_line, plural, ratio, seconds, where

LEGEND = (
    ("● faster than the model", "good"),
    ("◆ slower", "bad"),
    ("○ no difference shown", "quiet"),
    ("shaded: the noise floor", "band"),
)
Graphs = list[tuple[Place, str, dict[int, Compiled]]]
NOT_TRIED = ("not applicable", "absent", "not measured")


def section(
    task: str, speeds: list[Speed], means: list[Mean], against: list[Mean], each: list[Speed], graphs: Graphs
) -> Section:
    """The section of one task: means first, over the model and of two variants, then charts for each batch, then the numbers.

    `against` and `each`: variants over one another, over all models and on each. `graphs`: for each place and variant that
    compiled, how many graphs at each batch, in the order of batches.
    """
    name, title = (
        ("speed", "How fast is it at steady state?") if task == "inference" else ("training", "How fast does it train?")
    )
    mine = [s for s in speeds if s.place.task == task]
    if not mine:
        what = "training steps, split against whole" if task == "training" else "speeds"
        return Section(name, title, not_measured(f"the runs hold no {what}."))
    means, against = ([m for m in some if m.place.task == task] for some in (means, against))
    each = [s for s in each if s.place.task == task]
    graphs = [g for g in graphs if g[0].task == task]
    return Section(name, title, tuple(_blocks(task, mine, means, against, each, graphs)))


def floor_of(speeds: list[Speed], place: Place) -> float:
    """The largest noise floor among the models of a place; without any, there is none that a difference lies beyond."""
    floors = [s.against_model.floor for s in speeds if s.against_model and _overall(s.place) == _overall(place)]
    return max(floors, default=math.inf)


def mean_tone(mean: Mean, floor: float) -> str:
    """Faster or slower only by the rule for a single model, held against the largest floor of all; else quiet.

    What is faster, but failed on a model or is not what the model computes, is a warning.
    """
    tone = _paced(mean, floor)
    return "warn" if mean.off or (tone == "good" and tried(mean) > mean.geomean.n) else tone


def _paced(mean: Mean, floor: float) -> str:
    """The tone of the figure in a chart; what is off from the model is not faster."""
    found = mean.geomean.ratio
    if found is None or doubt(found, mean.geomean.processes, floor):
        return "quiet"
    return "bad" if found.estimate > 1 else "quiet" if mean.off else "good"


def mean_words(mean: Mean, floor: float) -> str:
    """What may be said about a mean, in the words of a verdict; where it failed or is off on some models, that too."""
    found, n = mean.geomean.ratio, mean.geomean.n
    if found is None:
        return "no value"
    why = doubt(found, mean.geomean.processes, floor)
    words = f"no difference shown ({why})" if why else "faster" if found.estimate < 1 else "slower"
    if tried(mean) > n:
        words += f", but failed on {plural(tried(mean) - n, 'model')}"
    return f"{words}, but off from the model on {', '.join(mean.off)}" if mean.off else words


def tried(mean: Mean) -> int:
    """On how many models it was tried, so that they gave a value or a failure of its own."""
    reasons = (why.split(": ")[:2] for why in mean.geomean.failures.values())  # a variant's name may stand before it
    return mean.geomean.n + sum(not any(part.startswith(NOT_TRIED) for part in why) for why in reasons)


def _overall(place: Place) -> tuple[str, str, str, int]:
    return place.environment, place.device, place.task, place.batch


def _blocks(
    task: str, speeds: list[Speed], means: list[Mean], against: list[Mean], each: list[Speed], graphs: Graphs
) -> Iterator[Block]:
    what = "a whole step: forward, loss, backward, optimizer" if task == "training" else "prefix, payload and suffix"
    yield Prose(
        "Time over that of the model itself, eager, in the same processes and rounds; below 1 is faster. A split's call is "
        f"{what}; every split is cut at half of its ops. A difference within the noise, or within {LEAST_DIFFERENCE:.0%}, or whose "
        "interval holds 1, is grey and counts as none."
    )
    yield _means_table(f"Geometric means, {task}", "over model(x) (95 %)", speeds, means)
    if against:
        yield _means_table(f"One variant over another, geometric means, {task}", "ratio (95 %)", speeds, against)
    if each:
        yield _pairs_table(f"One variant over another, by model, {task}: {plural(len(each), 'row')}", each)
    places = list(dict.fromkeys(_overall(s.place) for s in speeds))
    for number, key in enumerate(places):
        here = [s for s in speeds if _overall(s.place) == key]
        here_means = [m for m in means if _overall(m.place) == key]
        yield Figures(where(here[0].place), tuple(_figures(f"{task}-{number}", here, here_means)), LEGEND)
    yield _table(task, speeds)
    yield from _recompiled(task, speeds, graphs)
    yield from _strayed(speeds)


def _recompiled(task: str, speeds: list[Speed], graphs: Graphs) -> Iterator[Block]:
    """How many graphs were compiled at each batch, and whether any was compiled in the rounds."""
    again = {s.place: s.recompilations for s in speeds if s.recompilations}
    if graphs:
        yield _graphs_table(task, graphs)
        yield Prose(
            "The most that Dynamo and AOTInductor compiled in any process, one batch after the other; what a process compiles "
            "after its first batch is compiled again. What a kept cache spared is not counted for AOTInductor, whose packages are "
            "loaded. " + ("" if again else "In the rounds no process compiled any.")
        )
    for place, count in again.items():
        told = f"up to {plural(count, 'graph')} in the rounds of a process, by one of the variants there"
        yield Prose(f"{place.model}, {where(place)}: compiled {told}; times of these rounds hold that.", "warn")


def _graphs_table(task: str, graphs: Graphs) -> Table:
    batches = list(dict.fromkeys(batch for _, _, by_batch in graphs for batch in by_batch))
    rows = [
        cells(
            str(p.model),
            p.device,
            name,
            *(_compiled(by_batch.get(b)) for b in batches),
        )
        for p, name, by_batch in graphs
    ]
    head = tuple(f"batch {b}" for b in batches)
    title = f"Graphs compiled, batch after batch, {task}"
    return Table(title, ("model", "device", "variant", *head), tuple(rows), head)


def _compiled(c: Compiled | None) -> Cell:
    if c is None:
        return Cell("")
    return Cell(f"{c.graphs} ({c.again} again)", "warn") if c.again else Cell(str(c.graphs))


def _strayed(speeds: list[Speed]) -> Iterator[Prose]:
    """Variants whose outputs are off from the model's, unless the model's own are from call to call."""
    for s in speeds:
        own = next((n.strayed for n in speeds if n.place == s.place and n.variant == NOISE), None) or 0.0
        if s.variant == NOISE and own > STRAYED:
            off = f"is off from itself by {own:.1e}, for it draws at random; of variants nothing can be said"
            yield Prose(f"{s.place.model}, {where(s.place)}, {off}.", "quiet")
        elif s.off:
            yield Prose(
                f"{s.variant} on {s.place.model}, {where(s.place)}, is off from the model by {s.strayed:.1e}.", "warn"
            )


def _means_table(title: str, of: str, speeds: list[Speed], means: list[Mean]) -> Table:
    rows = []
    for m in means:
        g, floor = m.geomean, floor_of(speeds, m.place)
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, why in g.failures.items():
            by_reason[one_line(why, 160)].append(name)
        failures = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
        value = ratio(g.ratio) if g.ratio else ""
        tone = mean_tone(m, floor)
        verdict = Cell(mean_words(m, floor), tone)
        batch, noise = str(m.place.batch), "" if math.isinf(floor) else f"{floor:.1%}"
        rows.append(
            cells(batch, m.place.device, m.variant, Cell(value, tone), noise, verdict, f"{g.n} of {g.total}", failures)
        )
    head = ("batch", "device", "variant", of, "noise floor", "verdict", "models", "without a value")
    return Table(title, head, tuple(rows), ("batch", "noise floor"), stacked=True)


def _pairs_table(title: str, each: list[Speed]) -> Table:
    """Two variants on each model, so that a reader who has one model finds its own ratio with an interval."""
    rows = []
    for s in each:
        place = (str(s.place.model), str(s.place.batch), s.place.device, s.variant)
        if s.against_model is None:
            rows.append(cells(*place, "", "", Cell(one_line(s.failure or "no value"), "quiet")))
            continue
        c = s.against_model
        rows.append(cells(*place, Cell(ratio(c.ratio), _tone(s)), f"{c.floor:.1%}", Cell(_verdict(s), _cell_tone(s))))
    head = ("model", "batch", "device", "variants", "ratio (95 %)", "noise floor", "verdict")
    return Table(title, head, tuple(rows), ("batch", "noise floor"), folded=True, stacked=True)


def _figures(name: str, speeds: list[Speed], means: list[Mean]) -> Iterator[Figure]:
    models: dict[str, list[Speed]] = defaultdict(list)
    for s in speeds:
        if s.variant not in (EAGER, NOISE):
            models[str(s.place.model)].append(s)
    estimates = [s.against_model.ratio.estimate for s in speeds if s.against_model]
    domain = charts.domain_of([*estimates, *(b for s in speeds for b in _bounds(s))], 1.0)
    if means and any(m.geomean.ratio for m in means):
        floor = floor_of(speeds, means[0].place)  # finite: a mean is of speeds that have one
        rows = [_mean_dot(m, floor) for m in means if not inapplicable(m)]
        svg = charts.dots(rows, domain, "geometric mean over model(x)", band=floor)
        yield _figure(f"{name}-mean", "All models, geometric mean", svg, rows)
    for number, (model, some) in enumerate(models.items()):
        rows = [_dot(s) for s in some if not (s.failure or "").startswith("not applicable")]
        floor = next((s.against_model.floor for s in some if s.against_model), 0.0)
        svg = charts.dots(rows, domain, "time over model(x)", band=floor)
        yield _figure(f"{name}-{number}", model, svg, rows)


def _figure(name: str, title: str, svg: str, rows: list[charts.Dot]) -> Figure:
    told = "; ".join(f"{r.label} {r.words if r.estimate is None else f'{r.estimate:.3f}'}" for r in rows)
    label = f"{title}, time over the model's: {told}"
    return Figure(title, charts.named(svg, name, label), label)


def inapplicable(mean: Mean) -> bool:
    """Whether no model was to have a value: the variant is not for this task or device."""
    return mean.geomean.n == 0 and all(r.startswith("not applicable") for r in mean.geomean.failures.values())


def _bounds(s: Speed) -> list[float]:
    """The bounds that an axis should hold: of what is known to a factor of two or better."""
    if s.against_model is None:
        return []
    r = s.against_model.ratio
    return [b for b in (r.low, r.high) if r.estimate / 1.6 < b < r.estimate * 1.6]


def _mean_dot(m: Mean, floor: float) -> charts.Dot:
    r = m.geomean.ratio
    if r is None:
        return charts.Dot(m.variant, words="no value")
    return charts.Dot(m.variant, r.estimate, r.low, r.high, _paced(m, floor))


def _dot(s: Speed) -> charts.Dot:
    if s.against_model is None:
        words = one_line((s.failure or "no value").partition(":")[0], 30)
        return charts.Dot(s.variant, words=words)
    r = s.against_model.ratio
    return charts.Dot(s.variant, r.estimate, r.low, r.high, _tone(s))


def _tone(s: Speed) -> str:
    """The tone of the figure; what is off from the model is not faster."""
    verdict = s.against_model.verdict if s.against_model else ""
    return {"faster": "quiet" if s.off else "good", "slower": "bad"}.get(verdict, "quiet")


def _cell_tone(s: Speed) -> str:
    return "warn" if s.off else _tone(s)


def _verdict(s: Speed) -> str:
    """The verdict in words, with its reason, and how far the outputs are off, if they are."""
    c = s.against_model
    assert c is not None
    words = f"{c.verdict} ({c.reason})" if c.reason else c.verdict
    return f"{words}, but off by {s.strayed:.1e}" if s.off else words


def _table(task: str, speeds: list[Speed]) -> Table:
    head = (
        "model",
        "batch",
        "device",
        "variant",
        "median",
        "p90",
        "p99",
        "over model(x) (95 %)",
        "noise floor",
        "verdict",
    )
    rows = tuple(_row(s) for s in speeds)
    title = f"Every pair, {task}: {plural(len(rows), 'row')}"
    return Table(title, head, rows, ("batch", "median", "p90", "p99", "noise floor"), folded=True)


def _row(s: Speed) -> tuple[Cell, ...]:
    place = (str(s.place.model), str(s.place.batch), s.place.device, s.variant)
    if s.failure is not None or s.seconds is None:
        tone = "quiet" if (s.failure or "").startswith(("not applicable", "absent")) else "bad"
        return cells(*place, "", "", "", "", "", Cell(one_line(s.failure or "no value"), tone))
    tails = ["too few" if t is None else seconds(t) for t in (s.p90, s.p99)]
    if s.against_model is None:
        return cells(
            *place, seconds(s.seconds), *tails, "1", "", Cell("the model itself" if s.variant == EAGER else "", "quiet")
        )
    c = s.against_model
    verdict = Cell("the noise itself" if s.variant == NOISE else _verdict(s), _cell_tone(s))
    return cells(*place, seconds(s.seconds), *tails, Cell(ratio(c.ratio), _tone(s)), f"{c.floor:.1%}", verdict)
