"""Data -> static SVG, drawn by Vega-Lite without a browser, the same bytes each time.

Nothing in a chart is laid out by measuring text, so that fonts do not matter: margins, ticks and sizes are given. Colours are
the page's CSS variables, so that a chart follows its light or dark scheme.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from altair.utils.schemapi import debug_mode

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 210, 152, 18, 8, 38
ROW = 19
FONT = "sans-serif"
EXTENT = 52  # of the labels of an axis on the left
LONGEST = 25  # of a label, in characters
INK, QUIET, GRID, BAND = "var(--ink)", "var(--quiet)", "var(--grid)", "var(--band)"
TONES = {"good": "var(--good)", "bad": "var(--bad)", "quiet": "var(--quiet)", "": "var(--s1)"}
SHAPES = {"good": "circle", "bad": "diamond", "quiet": "circle", "": "square"}
SERIES = tuple(f"var(--s{i})" for i in range(1, 8))
NICE = (
    (1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 2.0, 5.0),
    (1.0, 3.0),
    (1.0,),
)


@dataclass(frozen=True)
class Dot:
    """A row of a dot plot: an estimate with its bounds, or None with `words` in its place."""

    label: str
    estimate: float | None = None
    low: float = math.nan
    high: float = math.nan
    tone: str = ""
    words: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a line chart: with dots at its points or without, or dots alone; in steps, or straight from point to point."""

    label: str
    points: tuple[tuple[float, float], ...]
    color: str = INK
    dash: tuple[int, ...] = (1, 0)
    dots: bool = False
    faint: bool = False
    joined: bool = True
    step: bool = False


@debug_mode(False)  # where altair checks each part of a chart, which takes as long as all else
def dots(rows: Sequence[Dot], domain: tuple[float, float], axis: str, *, band: float = 0.0, unit: str = "") -> str:
    """A dot plot on a logarithmic axis; `band`: the share around 1 that is shaded, and then 1 itself is ruled."""
    labels = [_label(i, row.label) for i, row in enumerate(rows)]
    y = _rows(labels)
    x = alt.Scale(type="log", domain=list(domain), nice=False, clamp=True)
    ticks = between(*domain)
    title = alt.X("x:Q", scale=x, title=axis, axis=_axis(ticks, unit))
    layers: list[Any] = []
    if band:
        edges = pd.DataFrame([{"x": 1 / (1 + band), "to": 1 + band}])
        layers.append(alt.Chart(edges).mark_rect(color=BAND, clip=True).encode(x=title, x2="to:Q"))
        layers.append(alt.Chart(pd.DataFrame([{"x": 1.0}])).mark_rule(color=QUIET, strokeDash=[3, 2]).encode(x=title))
    found = [
        {"row": label, "x": row.estimate, "low": row.low, "high": row.high, "tone": row.tone}
        for label, row in zip(labels, rows, strict=True)
        if row.estimate is not None
    ]
    for tone in sorted({str(f["tone"]) for f in found}):
        some = pd.DataFrame([f for f in found if f["tone"] == tone])
        color = TONES[tone]
        base = alt.Chart(some).encode(y=y)
        bounded = some[some["low"].between(-math.inf, math.inf, "neither") & some["high"].between(0, math.inf, "left")]
        bounded = bounded.assign(low=bounded["low"].clip(lower=domain[0]))  # from zero or below: from the axis's end
        if len(bounded):  # a single process gives no bounds
            ends = alt.Chart(bounded).mark_rule(color=color, strokeWidth=2, clip=True)
            layers.append(ends.encode(y=y, x=alt.X("low:Q", scale=x), x2="high:Q"))
        fill = "var(--paper)" if tone == "quiet" else color
        layers.append(
            base.mark_point(color=color, stroke=color, fill=fill, filled=False, size=46, opacity=1, shape=SHAPES[tone], clip=True)
            .encode(x=title)
        )  # fmt: skip
    words = [
        {"row": label, "words": row.words} for label, row in zip(labels, rows, strict=True) if row.estimate is None
    ]
    if words:
        mark = alt.Chart(pd.DataFrame(words)).mark_text(align="left", color=QUIET, fontSize=10, fontStyle="italic")
        layers.append(mark.encode(y=y, x=alt.value(6), text="words:N"))
    if not found:  # an axis all the same
        layers.append(alt.Chart(pd.DataFrame([{"x": domain[0]}])).mark_point(opacity=0).encode(x=title))
    return _svg(alt.layer(*layers), ROW * len(rows), LEFT)


@debug_mode(False)
def lines(
    series: Sequence[Line], axes: tuple[str, str], *, x_log: bool, y_log: bool, units: tuple[str, str] = ("", ""),
    stretches: Sequence[Line] = (), rule: float | None = None, height: int = 190,
) -> str:  # fmt: skip
    """A line chart; `stretches` are drawn thick over the lines, `rule` is an x that is marked."""
    every = [p for line in (*series, *stretches) for p in line.points]
    x_scale, x_axis = _continuous([x for x, _ in every], x_log, units[0], 20)
    y_scale, y_axis = _continuous([y for _, y in every], y_log, units[1], EXTENT)
    x, y = (
        alt.X("x:Q", scale=x_scale, axis=x_axis, title=axes[0]),
        alt.Y("y:Q", scale=y_scale, axis=y_axis, title=axes[1]),
    )
    layers: list[Any] = []
    if rule is not None:
        layers.append(alt.Chart(pd.DataFrame([{"x": rule}])).mark_rule(color=QUIET, strokeDash=[3, 2]).encode(x=x))
    for line, width in [*((s, 1.6) for s in series), *((s, 5.0) for s in stretches)]:
        frame = pd.DataFrame(line.points, columns=["x", "y"])
        base = alt.Chart(frame).encode(x=x, y=y)
        if line.dots:
            layers.append(base.mark_point(color=line.color, fill=line.color, size=22, opacity=1, clip=True))
        if not line.joined:
            continue
        shape = {"interpolate": "step-after"} if line.step else {}
        opacity = 0.55 if width > 2 else 0.35 if line.faint else 1
        layers.append(
            base.mark_line(color=line.color, strokeWidth=width, strokeDash=list(line.dash), opacity=opacity, clip=True, **shape)
        )  # fmt: skip
    return _svg(alt.layer(*layers), height, EXTENT + 20)


def domain_of(values: Iterable[float], around: float | None = None, share: float = 0.06) -> tuple[float, float]:
    """The ends of a logarithmic axis that holds all finite positive values, and `around`, with some room."""
    found = [v for v in (*values, *(() if around is None else (around,))) if 0 < v < math.inf]
    if not found:
        return 0.5, 2.0
    low, high = min(found), max(found)
    room = max((high / low) ** share, 1.03)
    return low / room, high * room


def between(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most six, evenly on a logarithmic axis as far as that goes."""
    if high < 1.6 * low:
        step = next(k * 10.0**p for p in range(-12, 15) for k in (1, 2, 5) if (high - low) / (k * 10.0**p) <= 5)
        return [float(f"{i * step:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    steps = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for chosen in NICE:
        found = [float(f"{k * 10.0**p:.3g}") for p in steps for k in chosen]
        found = [v for v in found if low <= v <= high]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def _continuous(values: Sequence[float], log: bool, unit: str, extent: int) -> tuple[alt.Scale, alt.Axis]:
    if log:
        low, high = domain_of(values)
        low, high = (low / 1.5, high * 1.5) if high < 2 * low else (low, high)
        return alt.Scale(type="log", domain=[low, high], nice=False), _axis(between(low, high), unit, extent)
    top = max([v for v in values if math.isfinite(v)], default=1.0) or 1.0
    step = next(k * 10.0**p for p in range(-12, 15) for k in (1, 2, 5) if top / (k * 10.0**p) <= 5)
    ticks = [float(f"{i * step:.6g}") for i in range(math.floor(top / step) + 1)]
    return alt.Scale(domain=[0, top * 1.03], nice=False), _axis(ticks, unit, extent)


def _axis(ticks: list[float], unit: str, extent: int = 20) -> alt.Axis:
    number, short = "format(datum.value, ',')", "format(datum.value, '~s')"
    if unit == "s":  # 10ms, 3s, 3,000s
        words = f"(datum.value >= 1000 ? {number} : {short}) + 's'"
    elif unit:  # 20kB
        words = f"{short} + '{unit}'"
    else:  # 0.7, 20, 3k
        words = f"datum.value >= 1000 ? {short} : {number}"
    return alt.Axis(
        values=ticks,
        labelExpr=words,
        labelOverlap=False,
        labelBound=False,
        labelFlush=False,
        labelLimit=0,
        minExtent=extent,
        maxExtent=extent,
    )


def _rows(labels: list[str]) -> alt.Y:
    axis = alt.Axis(
        labelExpr="slice(datum.label, 4)", labelLimit=0, labelOverlap=False, ticks=False, domain=False, grid=False
    )
    return alt.Y("row:N", sort=None, title=None, axis=axis, scale=alt.Scale(type="point", domain=labels, padding=0.5))


def _label(index: int, text: str) -> str:
    """A label that is unique by its first four characters, which the axis leaves out; a cache's state is never shortened."""
    if len(text) > LONGEST:
        variant, comma, cache = text.rpartition(", ")
        end = f"…{comma}{cache}" if variant else "…"
        text = (variant or text)[: LONGEST - len(end)] + end
    return f"{index:03d} {text}"


def _svg(chart: alt.LayerChart, height: int, left: int) -> str:
    total = WIDTH + LEFT - left
    chart = chart.properties(
        width=total, height=height, autosize="none", background="transparent",
        padding={"left": left, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    )  # fmt: skip
    chart = chart.configure(font=FONT).configure_view(stroke=None)
    chart = chart.configure_axis(
        labelColor=INK, titleColor=QUIET, gridColor=GRID, domainColor=QUIET, tickColor=QUIET,
        labelFontSize=11, titleFontSize=11, titleFontWeight="normal",
    )  # fmt: skip
    return vl_convert.vegalite_to_svg(chart.to_json(validate=False), allowed_base_urls=[])


def named(svg: str, name: str, label: str) -> str:
    """The SVG made fit for a page: ids that are its own, an accessible name, coordinates to a hundredth of a pixel."""
    found: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        return found.setdefault(match[0], f"{name}-clip{len(found)}")

    def tidy(match: re.Match[str]) -> str:
        tag = re.sub(r' (?:role|aria-[a-z]+|pointer-events|font-family)="[^"]*"', "", match[0])
        tag = re.sub(
            r"(?<![\w#-])-?\d+\.\d{3,}(?:e-?\d+)?", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), tag
        )
        tag = re.sub(
            r' class="mark-[^"]*"| opacity="1"| stroke-width="1"|(?<=<line) transform="translate\(0,0\)"', "", tag
        )
        return re.sub(r"\bclip\d+\b", rename, tag)

    svg = re.sub(r"<[^>]*>", tidy, svg)
    svg = re.sub(r'<path class="(?:background|foreground)"(?: d="(?:M0,0h0v0h0Z)?")?(?: display="none")?/>', "", svg)
    width, height = re.match(r'<svg[^>]* width="(\d+)" height="(\d+)"', svg).groups()  # type: ignore[union-attr]
    head = f'<svg role="img" aria-label="{html.escape(label)}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return head + svg[svg.index(">") + 1 :]
