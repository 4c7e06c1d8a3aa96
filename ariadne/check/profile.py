"""The frontier profile of a split: bytes along all cuts, and time along some of them, as a picture or an interactive page."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ariadne.capture import left_as_found
from ariadne.cut import SIDES, SplitCandidate, ends_of, parts
from ariadne.errors import AriadneError, SpecError
from ariadne.runtime import SplitRuntime
from ariadne.segment import emit
from ariadne.visualization import Profile, Times, chart, page, pareto, profile, render

FORMATS = ("svg", "png", "html")
MOST_LINES = 150_000  # of source that are made for a page: some seconds' worth
WARMUP = 2  # calls at each cut before those that count


def frontier_profile(
    runtime: SplitRuntime,
    outpath: str | os.PathLike[str] | None = None,
    *,
    fileformat: str = "svg",
    measure: bool = False,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    cuts: int = 12,
    iterations: int = 20,
    sources: int | None = None,
) -> Path:
    """Draw the bytes that cross at every cut of the plan, safe or not, with the Pareto-best cuts named; returns the path.

    `outpath`: without the ending; None means "frontier_profile" here. `fileformat`: svg; png, where there is a program that
    turns SVG into PNG; or html, a page that needs nothing beside it: hover shows what crosses at a cut and why it is not
    safe, a click the generated source of both sides, of as many as `sources` cuts: the Pareto-best ones, and others evenly
    placed; None means all of them, or for plans of many ops as many as can be written in seconds.

    With `measure`, the split is cut and run at as many as `cuts` safe places, on `example_inputs` and `example_kwargs`,
    `iterations` times each, and the share of the time that the prefix takes is drawn below, with the span that holds four calls
    of five: samples of one process, for the shape of the curve. Each place is prepared in the mode of the runtime, so one that
    compiles takes its time.

    Raises `SpecError` for options that have no meaning, `VisualizationError` where a PNG can't be made.

    >>> frontier_profile(
    ...     runtime, "profile", fileformat="html", measure=True, example_inputs=(torch.randn(8, 3, 224, 224),)
    ... )
    PosixPath('profile.html')
    """
    if sources is None:
        sources = max(100, MOST_LINES // len(runtime.plan.nodes))
    for name, number, least in (("cuts", cuts, 1), ("iterations", iterations, 1), ("sources", sources, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise SpecError(f"{name} is a whole number of at least {least}; found {number!r}")
    given = example_inputs is not None or bool(example_kwargs)
    if measure and not given:
        raise SpecError("measure=True runs the split, and so needs inputs: pass example_inputs=(x,), or example_kwargs")
    if given and not measure:
        raise SpecError("example inputs are for measuring; pass measure=True as well, or leave them out")
    path = render.place(outpath, "frontier_profile", fileformat, FORMATS)
    inputs = (tuple(example_inputs or ()), dict(example_kwargs or {}))
    times = measured_times(runtime, *inputs, cuts=cuts, iterations=iterations) if measure else {}
    found = profile(runtime.plan, runtime.candidates, runtime.candidate, times)
    if fileformat == "html":
        path.write_text(page.page(found, runtime.plan, _sources(runtime, found, sources)), encoding="utf-8")
        return path
    svg, size = chart.standalone(found)
    if fileformat == "png":
        return render.png(svg, size, path)
    path.write_text(svg, encoding="utf-8")
    return path


def measured_times(
    runtime: SplitRuntime, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, cuts: int, iterations: int
) -> dict[int, Times]:
    """Medians at the cut in use and at as many as `cuts` safe ones, evenly placed, by the number of ops in the prefix.

    The sides run one after the other, at one cut after the other, in every round, so that what slows the machine down for a
    while slows all of them. The model is left as found.
    """
    safe = [c for c in runtime.candidates if c.safe]
    chosen = sorted({c.cut: c for c in [*evenly(safe, cuts), runtime.candidate]}.items())
    splits = [(cut, runtime.resplit(c)) for cut, c in chosen]
    rounds: dict[int, list[tuple[float, float]]] = {cut: [] for cut, _ in splits}
    with left_as_found(runtime.model, runtime.plans):
        for number in range(WARMUP + iterations):
            for cut, split in splits:
                start = _now()
                boundary = split.run_prefix(*args, **kwargs)
                middle = _now()
                split.run_suffix(boundary)
                if number >= WARMUP:
                    rounds[cut].append((middle - start, _now() - middle))
    return {cut: Times.of(found) for cut, found in rounds.items()}


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def evenly(candidates: Sequence[SplitCandidate], count: int) -> list[SplitCandidate]:
    """At most `count` of them, evenly placed from the first to the last."""
    if len(candidates) <= count:
        return list(candidates)
    return [candidates[round(i * (len(candidates) - 1) / max(1, count - 1))] for i in range(count)]


def _sources(runtime: SplitRuntime, found: Profile, most: int) -> dict[int, tuple[str, str]]:
    """The generated source of both sides for the cut in use, the Pareto-best ones and as many others as that leaves room for."""
    safe = [p.candidate for p in found.points if p.candidate.safe]
    first = {c.cut: c for c in [runtime.candidate, *pareto(safe, ends_of(runtime.plan))][:most]}
    others = [c for c in safe if c.cut not in first]
    for c in evenly(others, most - len(first)) if most > len(first) else []:
        first[c.cut] = c
    kept = {}
    for cut, c in first.items():
        try:
            kept[cut] = tuple(emit(runtime.plan, part, runtime.model).text for part in parts(runtime.plan, (c,), SIDES))
        except AriadneError:  # the page says that it has none
            continue
    return {cut: (sides[0], sides[1]) for cut, sides in kept.items()}
