"""The frontier profile as SVG, written by hand: bytes on a logarithmic axis, and below it the measured share of the prefix."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence

from ariadne.units import size
from ariadne.visualization.curve import Band, Point, Profile

FONT = "system-ui, Helvetica, Arial, sans-serif"
LIGHT: Mapping[str, str] = {
    "ink": "#1f2328", "quiet": "#59636e", "paper": "#ffffff", "grid": "#d8dee4", "band": "#f3f5f7",
    "safe": "#0969da", "bad": "#bc4c00", "best": "#8250df",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "ink": "#f0f3f6", "quiet": "#a8b1bb", "paper": "#14171b", "grid": "#343b44", "band": "#1d2228",
    "safe": "#6cb6ff", "bad": "#f0883e", "best": "#d2a8ff",
}  # fmt: skip
STYLE = """
text { font-family: FONT; font-size: 11px; fill: INK; }
.quiet { fill: QUIET; } .title { font-size: 14px; font-weight: 600; }
.paper { fill: PAPER; } .band { fill: BAND; } .grid { stroke: GRID; stroke-width: 1; fill: none; }
.input { stroke: BAD; stroke-width: 1; stroke-dasharray: 5 4; fill: none; }
.curve { stroke: QUIET; stroke-width: 1; fill: none; } .share { stroke: SAFE; stroke-width: 1.5; fill: none; }
.spread { stroke: SAFE; stroke-width: 5; stroke-opacity: 0.3; }
.safe { fill: SAFE; } .bad { stroke: BAD; stroke-width: 1.6; fill: none; }
.best { fill: BEST; stroke: PAPER; stroke-width: 1; }
.number { fill: BEST; font-weight: 600; paint-order: stroke; stroke: PAPER; stroke-width: 3px; }
.lead { stroke: BEST; stroke-width: 0.7; } .chosen { fill: none; stroke: INK; stroke-width: 2; }
.rule { stroke: INK; stroke-width: 1; stroke-dasharray: 4 3; } .cursor { stroke: INK; stroke-width: 1; visibility: hidden; }
.ring { fill: none; stroke: INK; stroke-width: 1.5; visibility: hidden; }
"""
TOP, PLOT, SHARES, ROW, RIGHT = 62, 250, 92, 15, 14
CHARACTER = 6.2  # width of one, about, at 11 px


def style(colors: Mapping[str, str]) -> str:
    """The chart's CSS in these colours, which may be variables of a page."""
    text = STYLE.replace("FONT", FONT)
    for name, color in colors.items():
        text = text.replace(name.upper(), color)
    return text


def standalone(profile: Profile, width: int = 960) -> tuple[str, tuple[int, int]]:
    """The chart as a picture of its own, with its colours and the list of the best cuts; and its width and height."""
    body, height = chart(profile, width, listed=True)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
    )
    paper = f'<rect class="paper" width="{width}" height="{height}"/>\n'
    return f"{head}<style>{style(LIGHT)}</style>\n{paper}{body}</svg>\n", (width, height)


def chart(profile: Profile, width: int, *, listed: bool) -> tuple[str, int]:
    """The chart's elements without the `svg` around them, and their height; `listed` adds the best cuts by name."""
    scale = Scale(profile, width)
    parts = [*_frame(profile, scale), *_bands(profile.bands, scale), *_axis(scale), *_input(profile, scale)]
    parts += _points(profile, scale)
    bottom = TOP + PLOT
    if profile.measured:
        parts += _shares(profile, scale)
        bottom = scale.shares_top + SHARES
    if not listed:  # a page's script moves these
        ends = {
            "left": scale.left,
            "right": width - RIGHT,
            "top": TOP,
            "bottom": TOP + PLOT,
            "low": scale.low,
            "high": scale.high,
        }
        kept = html.escape(json.dumps(ends))
        parts.append(f'<line class="cursor" y1="{TOP}" y2="{bottom}" data-scale="{kept}"/><circle class="ring" r="6"/>')
    step = next(
        k * 10**p for p in range(9) for k in (1, 2, 5) if profile.ops / (k * 10**p) <= (5 if width < 500 else 10)
    )
    ticks = range(0, profile.ops + 1, step)
    parts += [_text(scale.x(tick), bottom + 15, str(tick), "quiet", "middle") for tick in ticks]
    parts.append(_text((scale.left + width - RIGHT) / 2, bottom + 31, "ops in the prefix", "quiet", "middle"))
    bottom += 40
    if listed:
        for number, row in _listing(profile):
            bottom += ROW
            parts += [_text(scale.left, bottom, number, "number"), _text(scale.left + 22, bottom, row)]
        bottom += 12
    return "\n".join(parts) + "\n", math.ceil(bottom)


class Scale:
    """Where cuts and bytes are on a chart of some width."""

    def __init__(self, profile: Profile, width: int) -> None:
        self.width, self.ops = width, profile.ops
        self.left = 62 if width >= 500 else 50
        self.shares_top = TOP + PLOT + 30
        crossing = [profile.ends.input_bytes, *(p.candidate.boundary_bytes for p in profile.points)]
        sizes = [nbytes for nbytes in crossing if nbytes > 0] or [1.0]
        self.low, self.high = math.log10(min(sizes)), math.log10(max(sizes))
        room = max(0.08, 0.06 * (self.high - self.low))
        self.low, self.high = self.low - room, self.high + 2 * room

    def x(self, cut: float) -> float:
        """Across, for a cut after so many ops."""
        return self.left + cut / self.ops * (self.width - self.left - RIGHT)

    def y(self, size: float) -> float:
        """Down, for so many bytes; none at all is at the lower edge."""
        if size <= 0:
            return float(TOP + PLOT)
        return TOP + PLOT * (self.high - math.log10(size)) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers of bytes, as many as there is room for."""
        for steps in ((1, 2, 5), (1, 3), (1,)):
            powers = range(math.floor(self.low) - 1, math.ceil(self.high) + 1)
            found = [k * 10.0**p for p in powers for k in steps if self.low <= math.log10(k * 10.0**p) <= self.high]
            if len(found) <= 8 or steps == (1,):
                return found[:: 1 + len(found) // 9]
        return []


def _frame(profile: Profile, scale: Scale) -> Iterator[str]:
    narrow = scale.width < 500
    yield _text(12, 20, f"{profile.title}: bytes per sample across each cut", "title" if scale.width >= 500 else "")
    y, x = 38, 12.0
    key = [
        ("safe", "safe"),
        ("bad", "not safe"),
        ("best", "Pareto-best" if narrow else "Pareto-best: sends less than the input and all cuts before it"),
    ]
    key += [("chosen", "chosen" if narrow else "the chosen cut")] if any(p.chosen for p in profile.points) else []
    for mark, words in key:
        yield _mark(mark, x + 5, y - 4, 3.5)
        yield _text(x + 14, y, words, "quiet")
        x += 28 + len(words) * 5.9


def _bands(bands: Sequence[Band], scale: Scale) -> Iterator[str]:
    for i, band in enumerate(bands):
        x, end = scale.x(band.start), scale.x(band.end)
        if i % 2 == 0:
            yield f'<rect class="band" x="{x:.1f}" y="{TOP - 14}" width="{end - x:.1f}" height="{PLOT + 14}"/>'
        parts = band.name.split(".")
        for name in (band.name, ".".join(parts[-2:]), parts[-1]):
            if len(name) * CHARACTER < end - x - 2:
                yield _text((x + end) / 2, TOP - 4, name, "quiet", "middle")
                break


def _axis(scale: Scale) -> Iterator[str]:
    for tick in scale.ticks():
        y = scale.y(tick)
        yield f'<path class="grid" d="M{scale.left} {y:.1f}H{scale.width - RIGHT}"/>'
        yield _text(scale.left - 6, y + 4, size(tick), "quiet", "end")
    yield f'<path class="grid" d="M{scale.left} {TOP + PLOT}H{scale.width - RIGHT}"/>'


def _input(profile: Profile, scale: Scale) -> Iterator[str]:
    """A line as high as the input: a cut above it sends more than no cut at all."""
    y = scale.y(profile.ends.input_bytes)
    yield f'<path class="input" d="M{scale.left} {y:.1f}H{scale.width - RIGHT}"/>'
    words = f"the input, {size(profile.ends.input_bytes)}"
    yield _text(scale.width - RIGHT - 4, y - 4, words, "quiet", "end")


def _points(profile: Profile, scale: Scale) -> Iterator[str]:
    at = [(scale.x(p.candidate.cut), scale.y(p.candidate.boundary_bytes)) for p in profile.points]
    if at:
        yield f'<path class="curve" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in at)}"/>'
    radius = max(1.3, min(3.2, (scale.width - scale.left) / max(1, len(at)) / 2.4))
    for point, (x, y) in zip(profile.points, at, strict=True):
        if point.chosen:
            yield f'<path class="rule" d="M{x:.1f} {TOP}V{TOP + PLOT}"/>'
        if not point.best:
            yield _mark("safe" if point.candidate.safe else "bad", x, y, radius)
    taken: list[tuple[float, float]] = []
    for number, (x, y, chosen) in enumerate(
        ((*a, p.chosen) for p, a in zip(profile.points, at, strict=True) if p.best), start=1
    ):
        across = x + 14 if chosen else x
        ways = [y - 10 - 6 * step for step in range(30)] + [y + 18 + 6 * step for step in range(30)]
        free = (
            w
            for w in ways
            if TOP + 8 < w < TOP + PLOT and not any(abs(across - a) < 14 and abs(w - b) < 12 for a, b in taken)
        )
        label = next(free, y - 10)
        taken.append((across, label))
        if abs(label - y) > 20:
            yield f'<path class="lead" d="M{x:.1f} {label + 2:.1f}V{y:.1f}"/>'
        yield _mark("best", x, y, 5)
        yield _text(across, label, str(number), "number", "middle")
    for point, (x, y) in zip(profile.points, at, strict=True):
        if point.chosen:
            yield _mark("chosen", x, y, 7)


def _shares(profile: Profile, scale: Scale) -> Iterator[str]:
    top = scale.shares_top
    yield _text(
        scale.left, top - 8, "measured share of the time that the prefix takes; a bar holds four calls of five", "quiet"
    )
    for share in (0.0, 0.5, 1.0):
        y = top + SHARES * (1 - share)
        yield f'<path class="grid" d="M{scale.left} {y:.1f}H{scale.width - RIGHT}"/>'
        yield _text(scale.left - 6, y + 4, f"{share:.0%}", "quiet", "end")
    timed = [(scale.x(p.candidate.cut), p.times) for p in profile.points if p.times is not None]
    at = [(x, top + SHARES * (1 - times.share)) for x, times in timed]
    for x, times in timed:
        yield f'<path class="spread" d="M{x:.1f} {top + SHARES * (1 - times.low):.1f}V{top + SHARES * (1 - times.high):.1f}"/>'
    yield f'<path class="share" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in at)}"/>'
    for x, y in at:
        yield f'<rect class="safe" x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5"/>'


def _listing(profile: Profile) -> Iterator[tuple[str, str]]:
    """The rows below a picture: a number and words."""
    sent, given = size(profile.ends.input_bytes), size(profile.ends.output_bytes)
    few = "" if profile.best else "; no safe cut sends less than the input"
    yield "", f"the input is {sent} per sample, the output {given}{few}"
    if profile.best:
        yield "", "Pareto-best cuts: neither the input nor a safe cut before it is as small"
    yield from ((str(number), summary(profile, point)) for number, point in enumerate(profile.best, start=1))
    yield from (("", f"chosen: {summary(profile, point)}") for point in profile.points if point.chosen)
    bad = sum(not p.candidate.safe for p in profile.points)
    yield "", f"{len(profile.points)} cuts, {bad} of them not safe"


def summary(profile: Profile, point: Point) -> str:
    """One cut in one line: `after layer2 (cut:34): 32.8 kB per sample, 34 of 69 ops in the prefix`."""
    c = point.candidate
    share = f", {point.times.share:.0%} of the time" if point.times is not None else ""
    sent = f"{size(c.boundary_bytes)} per sample"
    return f"after {point.where} ({c.split_id}): {sent}, {c.cut} of {profile.ops} ops{share} in the prefix"


def _mark(kind: str, x: float, y: float, r: float) -> str:
    if kind == "safe":
        return f'<circle class="safe" cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>'
    if kind == "bad":
        a, b, c, d = x - r, x + r, y - r, y + r
        return f'<path class="bad" d="M{a:.1f} {c:.1f}L{b:.1f} {d:.1f}M{a:.1f} {d:.1f}L{b:.1f} {c:.1f}"/>'
    if kind == "best":
        return f'<path class="best" d="M{x:.1f} {y - r:.1f}l{r} {r}l{-r} {r}l{-r} {-r}z"/>'
    return f'<rect class="chosen" x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:.1f}" height="{2 * r:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    look = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{look}>{html.escape(words)}</text>'
