"""What it costs to begin: preparation and first call with a cold and a warm cache, imports, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.findings import Start
from benchmarks.statistics import Geomean, geometric_mean, ratio_interval
from benchmarks.variants import ALL, EAGER
from reports import charts
from reports.document import Block, Cell, Figure, Figures, Prose, Section, Table, cells, not_measured
from reports.words import one_line, plural, ratio, seconds, seconds_interval, size

CACHES = {"cold": "cold", "warm": "warm", "none": "no cache"}
ORDER = {v.name: i for i, v in enumerate(ALL)}


def section(starts: list[Start]) -> Section:
    """Costs at the start, as a chart for each model and in numbers."""
    title = "What does it cost at the start?"
    if not starts:
        return Section("start", title, not_measured("the runs hold no costs at the start."))
    return Section("start", title, tuple(_blocks(starts)))


def place_key(s: Start) -> tuple[str, str, str, str | None, int]:
    """What stands together in one chart."""
    p = s.place
    return p.environment, p.device, p.task, p.model, p.batch


def groups(starts: list[Start]) -> dict[tuple[str, str, str, str | None, int], list[Start]]:
    """The starts by model, task and batch, in the order in which they were measured; within one, the variants' own order."""
    found: dict[tuple[str, str, str, str | None, int], list[Start]] = {}
    for s in starts:
        found.setdefault(place_key(s), []).append(s)
    for some in found.values():
        some.sort(key=lambda s: (ORDER.get(s.variant, len(ORDER)), s.cache))
    return found


def titled(s: Start) -> str:
    """The title of a chart: the model, the task, the batch, and the device where it is not the CPU."""
    p = s.place
    return f"{p.model}, {p.task}, batch {p.batch}" + ("" if p.device == "cpu" else f", {p.device}")


def named(s: Start) -> str:
    """A variant with the state of its cache."""
    return s.variant if s.cache == "none" else f"{s.variant}, {CACHES[s.cache]}"


def _blocks(starts: list[Start]) -> Iterator[Block]:
    starts = [s for some in groups(starts).values() for s in some]
    yield Prose(
        "Each figure is from a process of its own. Cost X is what preparation and the first calls took beyond as many steady "
        "calls, less the same for the model itself; what a variant imports beside torch counts as preparation. Cold: an empty "
        "compile cache; warm: the one that the cold process left."
    )
    measured = [s for s in starts if s.cost is not None]
    if measured:
        domain = charts.domain_of([v for s in measured if s.cost for v in (s.cost.estimate, s.cost.low, s.cost.high)])
        figures = tuple(_figure(i, some, domain) for i, some in enumerate(groups(starts).values()))
        yield Figures("Cost at the start, beyond the model's own", figures)
    head = ("model", "task", "batch", "device", "variant", "cache")
    rows = tuple(_row(s) for s in starts)
    yield Table(
        f"Costs at the start: {plural(len(rows), 'row')}",
        (*head, "prepare (95 %)", "first call (95 %)", "cost X (95 %)", "graphs", "recompiled", "processes"),
        rows,
        ("batch", "graphs", "recompiled", "processes"),
        folded=True,
    )
    yield from _warm([s for s in starts if s.first_over_cold])
    kept = [s for s in starts if s.failure is None]
    yield Table(
        f"Imports and memory: {plural(len(kept), 'row')}",
        (*head, "imports", "most memory of the process", "tensors of a call"),
        tuple(_memory(s) for s in kept),
        ("batch", "tensors of a call"),
        folded=True,
    )


def _warm(starts: list[Start]) -> Iterator[Block]:
    """What a warm cache leaves of the cold start, for each model and over them."""
    if not starts:
        return
    rows = []
    for s in starts:
        model, *key, _ = _where(s)
        found = [ratio(ratio_interval([*by_process.values()])) for by_process in (s.first_over_cold, s.whole_over_cold)]
        rows.append(cells(model, *key, *found, str(len(s.first_over_cold))))
    for loaded in loading(starts):
        first, whole = loaded.first, loaded.whole
        if first.total > 1:
            found = [ratio(g.ratio) if g.ratio else "" for g in (first, whole)]
            rows.append(cells(f"geometric mean of {first.n}", *loaded.where, *found, str(first.processes)))
    yield Prose(
        "Warm over cold: what was kept is loaded instead of compiled. Each ratio is of two processes of which the second found "
        "what the first left; imports are in neither."
    )
    head = ("model", "task", "batch", "device", "variant")
    over = ("first call, warm over cold (95 %)", "preparation and first call, warm over cold (95 %)")
    yield Table("Loading over compiling", (*head, *over, "processes"), tuple(rows), ("batch", "processes"))


@dataclass(frozen=True)
class Loaded:
    """What a warm cache leaves of the first call, and of preparation and first call together, over all models of a place.

    `where`: task, batch, device and variant, in words.
    """

    where: tuple[str, ...]
    first: Geomean
    whole: Geomean


def loading(starts: list[Start]) -> list[Loaded]:
    """Warm over cold by place and variant, in the order in which they were measured; a model that failed has no value."""
    groups: dict[tuple[str, ...], list[Start]] = defaultdict(list)
    for s in starts:
        if s.cache == "warm":
            groups[_where(s)[1:-1]].append(s)
    return [
        Loaded(where, _over_models(some, lambda s: s.first_over_cold), _over_models(some, lambda s: s.whole_over_cold))
        for where, some in groups.items()
    ]


def _over_models(some: list[Start], take: Callable[[Start], Mapping[int, float]]) -> Geomean:
    apart = "no cold process of the same number"
    return geometric_mean({str(s.place.model): s.failure or take(s) or apart for s in some})


def _figure(number: int, some: list[Start], domain: tuple[float, float]) -> Figure:
    rows = [_dot(s) for s in some if s.variant != EAGER]
    title = titled(some[0])
    told = "; ".join(f"{r.label} {r.words if r.estimate is None else seconds(r.estimate)}" for r in rows)
    label = f"{title}, cost at the start: {told}"
    return Figure(title, charts.named(charts.dots(rows, domain, "cost X", unit="s"), f"start-{number}", label), label)


def _dot(s: Start) -> charts.Dot:
    if s.failure is not None or s.cost is None:
        return charts.Dot(named(s), words=(s.failure or "no value").partition(":")[0])
    if s.cost.estimate <= 0:
        return charts.Dot(named(s), words="no more than the model")
    return charts.Dot(named(s), s.cost.estimate, s.cost.low, s.cost.high)


def _where(s: Start) -> tuple[str, ...]:
    p = s.place
    return str(p.model), p.task, str(p.batch), p.device, s.variant, CACHES[s.cache]


def _row(s: Start) -> tuple[Cell, ...]:
    if s.failure is not None:
        return cells(*_where(s), Cell(one_line(s.failure), "bad"), "", "", "", "", "")
    cost = (
        "" if s.variant == EAGER else "not known: no start of the model" if s.cost is None else seconds_interval(s.cost)
    )
    times = (seconds_interval(s.prepare), seconds_interval(s.first_call), cost)
    again = Cell(str(s.recompilations), "warn" if s.recompilations else "")
    many = str(s.processes) if s.variant == EAGER or s.paired == s.processes else f"{s.paired} of {s.processes} for X"
    return cells(*_where(s), *times, str(s.compilations), again, many)


def _memory(s: Start) -> tuple[Cell, ...]:
    imports = ", ".join(f"{name} {seconds(value)}" for name, value in (s.imports or {}).items())
    rss = ", ".join(f"{name} {size(value)}" for name, value in (s.rss_bytes or {}).items())
    return cells(*_where(s), imports, rss, "" if s.tensor_peak_bytes is None else size(s.tensor_peak_bytes))
