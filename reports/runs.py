"""Folders of raw results, read and checked; whatever can't be meant is an error that names the file and the line.

A folder holds any of the files in `KINDS` (of what was counted or done twice in a folder the last line stands; of the
selftests of several, the one that noticed least), and may hold
`suite/`, the suite's cases and expectations as they were; without it, today's are used and kept beside the report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import Records
from conformance.suite import expectations, lock, results
from conformance.suite.environment import Environment
from conformance.suite.expectations import Expectation
from conformance.suite.results import Results
from reports import timings
from reports.timings import Timings

KINDS = {
    "conformance*.jsonl": "results of the conformance suite",
    "benchmarks*.jsonl": "samples of the benchmarks",
    "cuts*.jsonl": "profiles along the cut",
    "selftest.jsonl": "the selftest's counts, one line for each time it ran",
    "fuzz.jsonl": "counts of random programs, one line for each kind",
    "pytest-benchmark*.json": "timings of one process, by pytest-benchmark",
    "equality*.jsonl": "split held against whole on the device that was measured",
    "steps.jsonl": "the commands that made this run, and whether each ended as it should",
}
SELFTEST = {"mutants": int, "killed": int, "rules": dict, "outcomes": list}
FUZZ = {"kind": str, "profile": str, "programs": int, "failures": int}
EQUALITY = {"model": str, "device": str, "task": str, "status": str}
STEPS = {"step": str, "failed": bool}
_TIMES, _COUNTS = ("seconds",), ("strayed", "graphs", "graphs_in_rounds")
SAMPLES: dict[str, tuple[str, ...]] = {
    "rounds": _TIMES + _COUNTS,
    "reference": _TIMES + _COUNTS,
    "start": (
        *("prepare_seconds", "calls_seconds", "graphs", "graphs_in_rounds", "imports", "rss_bytes", "cache"),
        *("seconds", "tensor_peak_bytes"),
    ),
    "cuts": ("cut", "after", "boundary_bytes", "prefix_ops", "suffix_ops", "unsafe", "auto", "seconds"),
    "parts": _TIMES,
}


@dataclass(frozen=True)
class RawFile:
    """A file that a run consists of: `name` within its folder, what it is, its bytes, and a remark about its end."""

    name: str
    about: str
    data: bytes
    remark: str = ""


@dataclass(frozen=True)
class Run:
    """The raw results of one or several folders as one; `folders` holds the files of each, `unread` what was left aside."""

    results: Results
    records: Records
    selftest: dict[str, Any] | None
    fuzz: tuple[dict[str, Any], ...]
    compared: tuple[dict[str, Any], ...]
    steps: tuple[dict[str, Any], ...]
    timings: tuple[Timings, ...]
    expectations: tuple[Expectation, ...]
    suite: int
    folders: tuple[tuple[RawFile, ...], ...]
    unread: tuple[str, ...]

    @property
    def environments(self) -> list[Environment]:
        """All environments in which anything was measured, by date."""
        found = self.results.environments | self.records.environments
        found |= {t.environment.id: t.environment for t in self.timings}
        return sorted(found.values(), key=lambda e: (e.date, e.id))


def read(folders: Sequence[Path]) -> Run:
    """The folders' results together. ValueError names the file and line, what was expected and what was found."""
    paths: dict[str, list[Path]] = {pattern: [] for pattern in KINDS}
    files, unread = [], []
    for number, folder in enumerate(folders, start=1):
        if not folder.is_dir():
            raise ValueError(f"{folder}: expected a folder with raw results, found {_what(folder)}")
        mine, others = _files(folder, paths)
        if not mine and (folder / "index.html").exists() and (folder / "data").is_dir():
            inside = [str(path) for path in sorted((folder / "data").iterdir()) if path.name.isdecimal()]
            raise ValueError(
                f"{folder}: expected a folder with raw results, found a report; what it was made from lies in "
                f"{' and '.join(inside) or 'no folder there'}"
            )
        files.append(mine)
        unread += [f"{number}/{name}" for name in others]
    suite = next((f / "suite" for f in folders if (f / "suite").is_dir()), None)
    cases, entries = (suite / "cases.lock", suite / "expectations") if suite else (lock.LOCK, expectations.FOLDER)
    if paths["conformance*.jsonl"] and not suite:
        files[0] += [
            *_kept(cases, "suite"),
            *(f for p in sorted(entries.glob("*.toml")) for f in _kept(p, "suite/expectations")),
        ]
    selftests = [[*_lines(p, SELFTEST)][-1] for p in paths["selftest.jsonl"]]
    held = results.read(*paths["conformance*.jsonl"])
    held.hold_single()
    held.hold_of_one_code()
    measured = records.read(*paths["benchmarks*.jsonl"], *paths["cuts*.jsonl"])
    _check_complete(paths["benchmarks*.jsonl"] + paths["cuts*.jsonl"])
    return Run(
        held,
        measured,
        max(selftests, key=lambda line: line["mutants"] - line["killed"], default=None),
        tuple(
            {(p, line["kind"], line["profile"]): line for p in paths["fuzz.jsonl"] for line in _lines(p, FUZZ)}.values()
        ),
        tuple(
            {
                (line["device"], line["model"], line["task"]): line
                for p in paths["equality*.jsonl"]
                for line in _lines(p, EQUALITY)
            }.values()
        ),
        tuple({(p, line["step"]): line for p in paths["steps.jsonl"] for line in _lines(p, STEPS)}.values()),
        tuple(timings.read(p) for p in paths["pytest-benchmark*.json"]),
        tuple(expectations.load(entries)) if paths["conformance*.jsonl"] else (),
        len(lock.read(cases)) if paths["conformance*.jsonl"] else 0,
        tuple(tuple(sorted(f, key=lambda f: f.name)) for f in files),
        tuple(unread),
    )


def _files(folder: Path, paths: dict[str, list[Path]]) -> tuple[list[RawFile], list[str]]:
    """The raw files of one folder, also sorted into `paths`, and the names of what else lies there."""
    found, others = [], []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name == "suite":
                found += [
                    f
                    for p in sorted(path.rglob("*"))
                    if p.is_file()
                    for f in _kept(p, p.parent.relative_to(folder).as_posix())
                ]
            elif not ((path / "index.html").exists() and (path / "data").exists()):  # an earlier report of this run
                others.append(f"{path.name}/")
            continue
        pattern = next((p for p in KINDS if path.match(p)), None)
        if pattern is None and path.suffix == ".jsonl":
            raise ValueError(
                f"{path}: expected one of {', '.join(KINDS)}, found a file of another name; rename or remove it"
            )
        if pattern is None:
            others.append(path.name)
            continue
        paths[pattern].append(path)
        remark = _checked(path, KINDS[pattern]) if path.suffix == ".jsonl" else ""
        found.append(RawFile(path.name, KINDS[pattern], path.read_bytes(), remark))
    return found, others


def _kept(path: Path, folder: str) -> list[RawFile]:
    return [RawFile(f"{folder}/{path.name}", "the suite as it was when this was reported", path.read_bytes())]


def _checked(path: Path, about: str) -> str:
    """A remark about an unfinished last line; ValueError where a line is no JSON object."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{number}: expected {about} as UTF-8, found the byte {error.object[error.start]:#04x}"
        ) from None
    *lines, rest = text.split("\n")
    if not lines:
        raise ValueError(f"{path}:1: expected {about}, found {'an unfinished line' if rest else 'an empty file'}")
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{path}:{number}: expected {about}, a JSON object to a line; found {line[:60]!r}")
    return "its last line is unfinished and was passed over" if rest else ""


def _lines(path: Path, fields: dict[str, type]) -> Iterable[dict[str, Any]]:
    """The finished lines of a file of counts, each with these fields."""
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        line = json.loads(text)
        for name, kind in fields.items():
            if not isinstance(line.get(name), kind):
                found = f"{line[name]!r}" if name in line else "no such field"
                raise ValueError(f"{path}:{number}: expected {name!r} to be {kind.__name__}, found {found[:60]}")
        yield line


def _check_complete(paths: Iterable[Path]) -> None:
    """ValueError for a sample that says "ok" and lacks what its job measures."""
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
            sample = json.loads(text)
            if "facts" in sample:
                continue
            where = f"{path}:{number}"
            if sample["job"] not in SAMPLES:
                raise ValueError(f"{where}: expected a job of {', '.join(SAMPLES)}, found {sample['job']!r}")
            if sample["status"] != "ok":
                if not isinstance(sample.get("reason"), str):
                    raise ValueError(f"{where}: expected a reason beside status {sample['status']!r}, found none")
                continue
            lacking = [name for name in SAMPLES[sample["job"]] if name not in sample]
            if lacking:
                raise ValueError(
                    f"{where}: expected {', '.join(map(repr, lacking))} in a sample of {sample['job']!r}, found none"
                )
            if sample["job"] == "start":
                _check_times(where, "prepare_seconds", [sample["prepare_seconds"]])
                _check_times(where, "calls_seconds", sample["calls_seconds"])
            if sample["job"] != "cuts" or sample["seconds"] is not None:  # most cuts are not timed
                _check_times(where, "seconds", sample["seconds"])


def _check_times(where: str, name: str, value: object) -> None:
    """ValueError unless each time is a number above zero, and series that belong together are of one length."""
    series = [*value.values()] if isinstance(value, dict) else [value]
    for times in series or [value]:
        good = isinstance(times, list) and times
        if not good or not all(isinstance(t, (int, float)) and math.isfinite(t) and t > 0 for t in times):
            raise ValueError(f"{where}: expected {name!r} to be times above zero, found {str(times)[:60]}")
    if isinstance(value, dict) and len(lengths := {len(times) for times in series}) > 1:
        raise ValueError(f"{where}: expected {name!r} to hold as many times for each, found {sorted(lengths)}")


def _what(path: Path) -> str:
    return "a file" if path.exists() else "nothing there"
