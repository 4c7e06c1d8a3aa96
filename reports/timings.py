"""What single processes timed by pytest-benchmark: preparing, a forward, the parts of a training step, the payload."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.suite.environment import Environment
from reports.document import Block, Cell, Prose, Section, Table, cells, not_measured
from reports.words import plural, seconds, size

TITLES = {
    "test_prepare.py": "Preparing, cutting elsewhere, finding every cut",
    "test_payload.py": "A boundary to bytes and back",
    "test_training.py": "A training step and its parts",
    "test_inference.py": "A forward",
}
FOLDED = ("test_training.py", "test_inference.py")  # of which there are verdicts elsewhere on the page


@dataclass(frozen=True)
class Timing:
    """One benchmark: its test, the group it stands in, the median and the quartiles' distance in seconds, and what was noted."""

    test: str
    group: str
    median: float
    iqr: float
    rounds: int
    noted: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Timings:
    """The benchmarks of one file, the environment that they ran in, and the commit."""

    environment: Environment
    commit: str
    of: tuple[Timing, ...]


def read(path: Path) -> Timings:
    """The file of one run of `pytest benchmarks --benchmark-json`; ValueError says what it lacks."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = found["machine_info"]
        environment = Environment.parse(
            {"environment": machine["environment"], "date": found["datetime"], "facts": machine["facts"]}
        )
        timings = Timings(
            environment, str(found["commit_info"].get("id") or ""), tuple(map(_timing, found["benchmarks"]))
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected what `pytest benchmarks --benchmark-json` writes, found {_begin(path)}: {error!r}"
        ) from None
    if not timings.of:
        raise ValueError(f"{path}: expected timings of at least one benchmark, found none")
    return timings


def _timing(found: dict[str, Any]) -> Timing:
    stats = found["stats"]
    times = [stats["median"], stats["iqr"]]
    if not all(isinstance(t, (int, float)) and math.isfinite(t) for t in times) or not times[0] > 0 or times[1] < 0:
        raise ValueError(f"median and iqr of {found['fullname']}, {times}, are no times")
    noted = tuple((str(k), _noted(k, v)) for k, v in sorted(found["extra_info"].items()))
    return Timing(str(found["fullname"]), str(found["group"] or ""), *times, int(stats["rounds"]), noted)


def _noted(name: str, value: object) -> str:
    return size(value) if name == "bytes" and isinstance(value, int) else str(value)


def _begin(path: Path) -> str:
    data = path.read_bytes()
    return f"{data[:40]!r} and {plural(len(data), 'byte')} in all" if data else "an empty file"


def section(found: Sequence[Timings]) -> Section:
    """A table for each suite and file of results."""
    title = "One process: preparing, the parts of a step, the payload"
    if not found:
        return Section("timings", title, not_measured("no run of pytest-benchmark; `nox -s benchmarks` makes one."))
    return Section("timings", title, tuple(_blocks(found)))


def _blocks(found: Sequence[Timings]) -> Iterator[Block]:
    yield Prose(
        "Each row was timed in a single process by pytest-benchmark: a median over rounds, and how far the quartiles lie apart. "
        "There is neither an interval nor a verdict; another process may give another median."
    )
    for timings in found:
        by_file: dict[str, list[Timing]] = defaultdict(list)
        for one in timings.of:
            by_file[one.test.partition("::")[0].rpartition("/")[2]].append(one)
        where = f", {timings.environment.id}" if len(found) > 1 else ""
        for file in sorted(by_file, key=lambda f: ([*TITLES].index(f) if f in TITLES else len(TITLES), f)):
            yield _table(f"{TITLES.get(file, file)}{where}", by_file[file], file in FOLDED)


def _table(title: str, timings: list[Timing], folded: bool) -> Table:
    head = ("what", "median", "quartiles apart", "rounds", "noted", "again")
    rows = (
        cells(
            f"{t.group}: {_name(t.test)}" if t.group else _name(t.test),
            seconds(t.median),
            seconds(t.iqr),
            str(t.rounds),
            ", ".join(f"{name} {value}" for name, value in t.noted),
            Cell(f"pytest '{t.test}'", code=True),
        )
        for t in timings
    )
    return Table(title, head, tuple(rows), ("median", "quartiles apart", "rounds"), folded=folded, stacked=True)


def _name(test: str) -> str:
    """What a test times: its name without "test_".

    >>> _name("benchmarks/test_payload.py::test_to_bytes[1-nn/mlp10x64]")
    'to bytes [1-nn/mlp10x64]'
    """
    name, bracket, parameters = test.partition("::")[2].removeprefix("test_").partition("[")
    return name.replace("_", " ") + (f" [{parameters}" if bracket else "")
