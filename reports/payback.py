"""Break-even: after how many calls has compiling cost no more than eager; verdicts, and time against calls."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.break_even import BETWEEN, NEVER, NOT_SHOWN, BreakEven
from benchmarks.findings import Start
from benchmarks.statistics import FEWEST_PROCESSES
from benchmarks.variants import EAGER
from reports import charts
from reports.document import Block, Cell, Figure, Figures, Prose, Section, Table, cells, not_measured
from reports.speed import NOT_TRIED
from reports.startup import CACHES, groups, named, titled
from reports.words import one_line, plural, seconds_interval

FAILED, UNJUDGED = "failed", "not judged"
WHY_UNJUDGED = f"a verdict takes {FEWEST_PROCESSES} processes of each"
TONES = {BETWEEN: "good", NEVER: "bad", NOT_SHOWN: "quiet"}
DASHES = {"cold": (1, 0), "warm": (5, 3), "none": (2, 2)}


def judged(starts: list[Start]) -> list[Start]:
    """Those that break-even was asked of, failures among them, and those whose model did not start."""
    return [s for s in starts if s.calls is not None or failed(s) or (s.variant != EAGER and s.failure is None)]


def unjudged(s: Start) -> bool:
    """Whether too few processes measured it, and the model beside it, for any verdict."""
    return s.failure is None and s.paired < FEWEST_PROCESSES


def failed(s: Start) -> bool:
    """Whether break-even was asked of it and it came to nothing."""
    return s.variant != EAGER and s.failure is not None and not s.failure.startswith(NOT_TRIED)


def section(starts: list[Start]) -> Section:
    """The verdicts, and a chart for each model."""
    title = "After how many calls has it paid?"
    if not judged(starts):
        return Section(
            "break-even", title, not_measured("the runs hold no costs at the start with a saving beside them.")
        )
    return Section("break-even", title, tuple(_blocks(starts)))


def counted(starts: list[Start], cache: str) -> str:
    """The verdicts with one state of the cache, counted."""
    mine = [s for s in judged(starts) if s.cache == cache]
    verdicts = [UNJUDGED if unjudged(s) else s.calls.verdict if s.calls else FAILED for s in mine]
    shown = (BETWEEN, NOT_SHOWN, NEVER, *(extra for extra in (UNJUDGED, FAILED) if extra in verdicts))
    return ", ".join(f"{verdicts.count(v)} {'paid' if v == BETWEEN else v}" for v in shown)


def _blocks(starts: list[Start]) -> Iterator[Block]:
    starts = [s for some in groups(starts).values() for s in some]
    found = judged(starts)
    told = "; ".join(f"{CACHES[c]}: {counted(starts, c)}" for c in CACHES if any(s.cache == c for s in found))
    yield Prose(
        "Three verdicts: it has paid for itself somewhere between two numbers of calls; no saving is shown; it never pays, "
        f"for a call takes longer than the model's. With fewer than {FEWEST_PROCESSES} processes there is none, which is no word "
        "against it. Eager seconds are the time in which the model itself makes as many calls. "
        f"{plural(len(found), 'variant and cache', 'variants and caches')}. {told}."
    )
    rows = tuple(_row(s) for s in starts if s.variant != EAGER or s.failure is not None)
    head = ("model", "task", "batch", "device", "variant", "cache", "cost X (95 %)", "saved per call (95 %)")
    yield Table("Verdicts", (*head, "paid back after", "in eager seconds"), rows, ("batch",), stacked=True)
    colors = {
        name: charts.SERIES[i % len(charts.SERIES)] for i, name in enumerate(dict.fromkeys(s.variant for s in found))
    }
    figures = []
    for number, some in enumerate(groups(found).values()):
        figures += [f for f in (_figure(number, some, colors),) if f is not None]
    if figures:
        legend = [("model", "ink"), *((name, f"s{charts.SERIES.index(color) + 1}") for name, color in colors.items())]
        note = (
            "Solid: cold cache; dashed: warm; dotted: none. Faint: the means of what is not shown to pay, whose crossing with "
            "the model's line means nothing. Dots on the model's line: the interval of break-even."
        )
        yield Figures("Cumulative time against calls", tuple(figures), tuple(legend), note)


def _figure(number: int, some: list[Start], colors: dict[str, str]) -> Figure | None:
    drawn = [s for s in some if s.balance and s.pace is not None]
    if not drawn:
        return None
    # One axis for all: as far as the furthest break-even that was shown, or else to a hundred thousand calls.
    last = max(s.balance[-1][0] for s in drawn)
    pace = drawn[0].pace
    assert pace is not None
    calls = next(s.balance for s in drawn if s.balance[-1][0] == last)
    lines = [charts.Line("model", tuple((n, n * pace.estimate) for n, _ in calls))]
    stretches = []
    for s in drawn:
        assert s.cost is not None
        assert s.saving is not None
        steady = pace.estimate - s.saving.estimate  # at the model's line's own pace, to cross it where it pays
        points = tuple((n, s.cost.estimate + n * steady) for n, _ in calls)
        faint = s.calls is None or s.calls.verdict == NOT_SHOWN
        above = tuple(p for p in points if p[1] > 0)
        lines.append(charts.Line(named(s), above, colors[s.variant], DASHES[s.cache], faint=faint))
        if s.calls is not None and s.calls.verdict == BETWEEN and s.calls.high > 0:
            ends = (max(1.0, s.calls.low), max(1.0, s.calls.high))
            stretches.append(
                charts.Line(named(s), tuple((n, n * pace.estimate) for n in ends), colors[s.variant], dots=True)
            )
    title = titled(drawn[0])
    told = "; ".join(f"{named(s)} {_verdict(s, s.calls, 'calls').text if s.calls else ''}" for s in drawn)
    label = f"{title}, cumulative time against calls: {told}"
    svg = charts.lines(
        lines, ("calls", "cumulative time"), x_log=True, y_log=True, units=("", "s"), stretches=stretches
    )
    return Figure(title, charts.named(svg, f"break-even-{number}", label), label)


def _row(s: Start) -> tuple[Cell, ...]:
    p = s.place
    where = (str(p.model), p.task, str(p.batch), p.device, s.variant, CACHES[s.cache])
    if s.calls is None or s.seconds is None:
        tone = "bad" if s.failure else "quiet"
        return cells(*where, Cell(one_line(s.failure or "not known: no start of the model"), tone), "", "", "")
    return cells(
        *where,
        seconds_interval(s.cost),
        seconds_interval(s.saving),
        *(_verdict(s, found, unit) for found, unit in ((s.calls, "calls"), (s.seconds, "s"))),
    )


def _verdict(s: Start, found: BreakEven, unit: str) -> Cell:
    if unjudged(s):
        return Cell(f"{UNJUDGED} ({s.paired} of at least {FEWEST_PROCESSES} processes)", "quiet")
    return Cell(found.words(unit), TONES[found.verdict])
