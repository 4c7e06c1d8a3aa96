"""Bytes and time along the position of the cut, for each model that was profiled."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.records import Record, Records
from benchmarks.statistics import ratio_of_pairs
from reports import charts
from reports.document import Block, Cell, Figure, Figures, Prose, Section, Table, cells, not_measured
from reports.words import one_line, plural, seconds, size


@dataclass(frozen=True)
class Cut:
    """One cut of a model's plan; the times, in seconds, are medians over rounds, None where it was not timed.

    `share`: the prefix's share of the time of both sides; `over_model`: both sides over the whole model.
    """

    model: str
    device: str
    batch: int
    cut: int
    after: str
    boundary_bytes: float
    prefix_ops: int
    suffix_ops: int
    unsafe: str
    auto: bool
    prefix: float | None = None
    suffix: float | None = None
    share: float | None = None
    over_model: float | None = None


def cuts(records: Records) -> list[Cut]:
    """Every cut of every profiled model, in order."""
    return [_cut(s) for s in _newest(records) if s["status"] == "ok"]


def failures(records: Records) -> list[Record]:
    """The models that could not be profiled."""
    return [s for s in _newest(records) if s["status"] != "ok"]


def _newest(records: Records) -> list[Record]:
    """The samples of each model's last profile: one made again after a change has another environment."""
    groups: dict[tuple[str, str, int], dict[str, list[Record]]] = {}
    for s in records.of("cuts"):
        by_environment = groups.setdefault((s["model"], s["device"], s["batch"]), {})
        by_environment.setdefault(s["environment"], []).append(s)

    def moment(samples: list[Record]) -> tuple[str, str]:
        return max(s.get("date", "") for s in samples), records.environments[samples[0]["environment"]].date

    return [s for profiles in groups.values() for s in max(profiles.values(), key=moment)]


def _cut(s: Record) -> Cut:
    names = ("model", "device", "batch", "cut", "after", "boundary_bytes", "prefix_ops", "suffix_ops", "unsafe", "auto")
    facts = {name: s[name] for name in names}
    if s["seconds"] is None:
        return Cut(**facts)
    prefix, suffix, whole = (s["seconds"][name] for name in ("prefix", "suffix", "model"))
    both = [a + b for a, b in zip(prefix, suffix, strict=True)]
    return Cut(
        **facts,
        prefix=statistics.median(prefix),
        suffix=statistics.median(suffix),
        share=ratio_of_pairs(prefix, both),
        over_model=ratio_of_pairs(both, whole),
    )


def section(records: Records) -> Section:
    """Two charts for each model, bytes and time, and the timed cuts in numbers."""
    title = "Where to cut: bytes and time along the model"
    if not records.of("cuts"):
        return Section("boundary", title, not_measured("the runs hold no profile along the cut."))
    return Section("boundary", title, tuple(_blocks(records)))


def _blocks(records: Records) -> Iterator[Block]:
    yield Prose(
        "Every cut of the plan by its position among the ops; bytes per sample that cross it. Some safe cuts, evenly placed, and "
        'the one that "auto" chooses (dashed) were timed: prefix, suffix and whole model in rounds of random order, medians of '
        "one process. There is no interval to that: read the shape."
    )
    groups: dict[tuple[str, str, int], list[Cut]] = {}
    for cut in cuts(records):
        groups.setdefault((cut.model, cut.device, cut.batch), []).append(cut)
    for s in failures(records):
        yield Prose(f"{s['model']}, {s['device']}: {s['status']}: {s['reason']}", "bad")
    rows = []
    for (model, device, batch), some in groups.items():
        safe = [c for c in some if not c.unsafe]
        auto, least = _auto(some), _named(min(safe, key=lambda c: c.boundary_bytes)) if safe else "none"
        name = f"cut {auto.cut}" + (f", after {auto.after}" if auto.after else "")
        many = f"{len(safe):,} of {len(some):,}"
        rows.append(cells(model, device, str(batch), many, name, size(auto.boundary_bytes), least, _share(auto)))
    if rows:
        head = (
            "model",
            "device",
            "batch",
            "safe cuts",
            "auto",
            "its bytes per sample",
            "fewest of a safe cut",
            "prefix's share of time",
        )
        yield Table("Models", head, tuple(rows), ("batch", "safe cuts", "its bytes per sample"))
        figures = tuple(f for i, some in enumerate(groups.values()) for f in _figures(i, some))
        yield Figures("Along the cut", figures, (("bytes, prefix", "s1"), ("suffix", "s2"), ("unsafe cuts", "bad")))
        timed = [c for some in groups.values() for c in some if c.prefix is not None]
        head = (
            "model",
            "device",
            "batch",
            "cut",
            "after",
            "bytes per sample",
            "prefix ops",
            "suffix ops",
            "prefix",
            "suffix",
            "share",
            "over model(x)",
        )
        yield Table(
            f"Timed cuts: {plural(len(timed), 'row')}", head, tuple(map(_row, timed)), head[2:4] + head[5:], folded=True
        )
        unsafe = [c for some in groups.values() for c in some if c.unsafe]
        if unsafe:
            yield _unsafe(unsafe)


def _unsafe(some: list[Cut]) -> Table:
    groups: dict[tuple[str, str, str, str], list[Cut]] = {}
    for c in some:
        groups.setdefault((c.model, c.device, str(c.batch), one_line(c.unsafe, 240)), []).append(c)
    rows = tuple(
        cells(*place, str(len(same)), _spans([c.cut for c in same]), why) for (*place, why), same in groups.items()
    )
    head = ("model", "device", "batch", "cuts", "which", "why")
    return Table(f"Unsafe cuts: {plural(len(some), 'cut')}", head, rows, ("batch", "cuts"), folded=True)


def _named(c: Cut) -> str:
    """A cut's bytes, and which it is."""
    return f"{size(c.boundary_bytes)}, cut {c.cut}" + (f", after {c.after}" if c.after else "")


def _auto(some: list[Cut]) -> Cut:
    return next((c for c in some if c.auto), some[0])


def _spans(found: list[int]) -> str:
    """Numbers as spans, "3 to 5, 9"."""
    spans: list[list[int]] = []
    for n in found:
        if spans and n == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], n]
        else:
            spans.append([n])
    return ", ".join(" to ".join(map(str, span)) for span in spans)


def _figures(number: int, some: list[Cut]) -> Iterator[Figure]:
    auto = _auto(some)
    model = auto.model if auto.device == "cpu" else f"{auto.model}, {auto.device}"
    sizes = charts.Line("bytes", tuple((c.cut, c.boundary_bytes) for c in some), charts.SERIES[0], step=True)
    least = min(c.boundary_bytes for c in some)
    at = tuple((c.cut + 0.5, c.boundary_bytes) for c in some if c.unsafe)
    unsafe = charts.Line("unsafe", at, charts.TONES["bad"], dots=True, joined=False)
    svg = charts.lines(
        [sizes, unsafe] if at else [sizes], ("cut after op", "bytes per sample"), x_log=False, y_log=least > 0, units=("", "B"),
        rule=auto.cut, height=150,
    )  # fmt: skip
    ends = f"{size(least)} to {size(max(c.boundary_bytes for c in some))}, auto {size(auto.boundary_bytes)}"
    label = f"{model}, bytes per sample across each cut: {ends}"
    yield Figure(f"{model}: bytes", charts.named(svg, f"bytes-{number}", label), label)
    timed = [c for c in some if c.prefix is not None and c.suffix is not None]
    if len(timed) < 2:
        return
    lines = [
        charts.Line("prefix", tuple((c.cut, c.prefix or 0.0) for c in timed), charts.SERIES[0], dots=True),
        charts.Line("suffix", tuple((c.cut, c.suffix or 0.0) for c in timed), charts.SERIES[1], dots=True, dash=(5, 3)),
    ]
    axes = ("cut after op", "time of a call")
    svg = charts.lines(lines, axes, x_log=False, y_log=False, units=("", "s"), rule=auto.cut, height=150)
    told = f"time of prefix and suffix at {len(timed)} cuts; the prefix's share at auto: {_share(auto).text}"
    label = f"{model}, batch {auto.batch}, {told}"
    yield Figure(f"{model}: time, batch {auto.batch}", charts.named(svg, f"time-{number}", label), label)


def _share(c: Cut) -> Cell:
    return Cell("not timed", "quiet") if c.share is None else Cell(f"{c.share:.0%}")


def _row(c: Cut) -> tuple[Cell, ...]:
    times = [seconds(t) for t in (c.prefix, c.suffix) if t is not None]
    name = f"{c.cut} (auto)" if c.auto else str(c.cut)
    ops = (str(c.prefix_ops), str(c.suffix_ops))
    return cells(
        c.model,
        c.device,
        str(c.batch),
        name,
        c.after,
        size(c.boundary_bytes),
        *ops,
        *times,
        _share(c),
        f"{c.over_model or 0:.3f}",
    )
