"""Findings as tables of numbers: pandas frames, written as Parquet beside the raw results."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pandas as pd

from benchmarks.break_even import BreakEven
from benchmarks.findings import Mean, Place, Speed, Start
from benchmarks.statistics import Interval
from reports.boundary import Cut
from reports.earlier import Pair
from reports.equality import Judged


def tables(
    found: list[Judged], speeds: list[Speed], means: list[Mean], starts: list[Start], cuts: list[Cut], pairs: list[Pair]
) -> dict[str, pd.DataFrame]:
    """The tables by name; those without rows are left out."""
    rows: dict[str, Iterable[dict[str, Any]]] = {
        "cases": map(_case, found),
        "speeds": map(_speed, speeds),
        "means": map(_mean, means),
        "starts": map(_start, starts),
        "cuts": map(asdict, cuts),
        "earlier": map(asdict, pairs),
    }
    frames = {name: pd.DataFrame(list(some)) for name, some in rows.items()}
    return {name: frame for name, frame in frames.items() if len(frame)}


def parquet(frame: pd.DataFrame) -> bytes:
    """A table as the bytes of a Parquet file."""
    file = io.BytesIO()
    frame.to_parquet(file, engine="pyarrow", index=False)
    return file.getvalue()


def _case(j: Judged) -> dict[str, Any]:
    parameters = {key: j.case.get(key) for key in ("cut", "bs", "mode", "backend", "steps")}
    found = {"case": str(j.case), "check": j.case.check, "model": j.case.model, **parameters}
    result = {
        "status": str(j.result.status),
        "outcome": j.outcome,
        "reason": j.result.reason,
        "seconds": j.result.seconds,
    }
    return {**found, **result, "environment": j.result.environment}


def _place(place: Place) -> dict[str, Any]:
    return asdict(place)


def _bounds(name: str, value: Interval | None) -> dict[str, float | None]:
    ends = ("", "_low", "_high")
    if value is None:
        return dict.fromkeys(name + end for end in ends)
    return dict(zip((name + end for end in ends), (value.estimate, value.low, value.high), strict=True))


def _speed(s: Speed) -> dict[str, Any]:
    c = s.against_model
    numbers = {"seconds": s.seconds, "p90": s.p90, "p99": s.p99, **_bounds("ratio", c.ratio if c else None)}
    verdict = {
        "floor": c.floor if c else None,
        "processes": c.processes if c else None,
        "verdict": c.verdict if c else None,
    }
    return {
        **_place(s.place),
        "variant": s.variant,
        **numbers,
        **verdict,
        "reason": c.reason if c else None,
        "strayed": s.strayed,
        "graphs_in_rounds": s.recompilations,
        "failure": s.failure,
    }


def _mean(m: Mean) -> dict[str, Any]:
    found = {**_place(m.place), "variant": m.variant, **_bounds("ratio", m.geomean.ratio)}
    return {**found, "n": m.geomean.n, "total": m.geomean.total, "processes": m.geomean.processes}


def _start(s: Start) -> dict[str, Any]:
    found: dict[str, Any] = {**_place(s.place), "variant": s.variant, "cache": s.cache, "processes": s.processes}
    for name in ("prepare", "first_call", "cost", "saving", "pace"):
        found |= _bounds(name, getattr(s, name))
    found |= _verdict("calls", s.calls) | _verdict("eager_seconds", s.seconds)
    memory = {f"rss_{key}": value for key, value in (s.rss_bytes or {}).items()}
    imports = {f"import_{key}": value for key, value in (s.imports or {}).items()}
    graphs = {"compilations": s.compilations, "recompilations": s.recompilations}
    return {**found, **graphs, **memory, **imports, "tensor_peak_bytes": s.tensor_peak_bytes, "failure": s.failure}


def _verdict(name: str, found: BreakEven | None) -> dict[str, Any]:
    if found is None:
        return dict.fromkeys((f"{name}_verdict", f"{name}_low", f"{name}_high"))
    return {f"{name}_verdict": found.verdict, f"{name}_low": found.low, f"{name}_high": found.high}
