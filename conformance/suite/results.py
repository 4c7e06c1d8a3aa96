"""Results: JSON lines, appended as they come, which can be read back, resumed and merged.

A file holds records of two kinds: `{"environment": id, "date": …, "facts": {…}}`, one for each environment that wrote to
it, and `{"case": …, "status": …, "reason": …, "facts": {…}, "seconds": …, "environment": id}`, one for each case that ran.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.suite.environment import Environment
from conformance.suite.statuses import Status

_ROOT = Path(__file__).resolve().parents[2]
_PLACES = re.compile(
    rf"/\S*?/(?=site-packages/)|/\S*?/lib/(?=python3\.\d+/)|{re.escape(str(_ROOT))}/|{re.escape(tempfile.gettempdir())}/"
)


CODE = ("target", "target_sources", "sources", "torch", "python")  # what all results that are judged together share


@dataclass(frozen=True)
class Result:
    """What one case came to, where and in how many seconds."""

    case: str
    status: Status
    reason: str
    facts: Mapping[str, Any]
    seconds: float
    environment: str


@dataclass
class Results:
    """The records of one or several files: environments by id, and of each case the last result that ran."""

    environments: dict[str, Environment] = field(default_factory=dict)
    by_case: dict[str, Result] = field(default_factory=dict)
    others: dict[str, Result] = field(default_factory=dict)  # of cases that came to several things, an earlier one

    def add(self, record: Environment | Result) -> None:
        """Take in one record; a result replaces an earlier one of its case, unless it says that the case did not run."""
        if isinstance(record, Environment):
            self.environments.setdefault(record.id, record)
            return
        before = self.by_case.get(record.case)
        if before is not None and record.status == Status.NOT_SELECTED:
            return
        same = before is not None and (before.environment, before.status) == (record.environment, record.status)
        if before is not None and not same and before.status != Status.NOT_SELECTED:
            self.others[record.case] = before
        self.by_case[record.case] = record

    def of(self, environment: str) -> Results:
        """The results of one environment alone."""
        return Results(self.environments, {c: r for c, r in self.by_case.items() if r.environment == environment})

    def hold_single(self) -> None:
        """Raise ValueError where a case came to two things, of which only the last would show."""
        for case, other in sorted(self.others.items()):
            last = self.by_case[case]
            raise ValueError(
                f"{len(self.others)} cases have two results, {case} for one: {other.status} in {other.environment}, "
                f"{last.status} in {last.environment}. Give files of one environment, and with one result of each case"
            )

    def hold_of_one_code(self) -> None:
        """Raise ValueError where these are results of different targets, sources, torch or Python: no verdict is about all.

        The packages may differ that a family of models needs.
        """
        used = {r.environment for r in self.by_case.values()}
        for what in CODE:
            found = sorted({self.environments[e].facts.get(what, "none") for e in used})
            if len(found) > 1:
                raise ValueError(f"results of different code can't stand side by side: {what} {' and '.join(found)}")


def append(path: Path, record: Environment | Result) -> None:
    """Append one line in a single write, so that several processes may share the file."""
    data = (line(record) + "\n").encode()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(fd, data)
    finally:
        os.close(fd)
    if written != len(data):
        raise OSError(f"{path}: {written} of {len(data)} bytes were written; is the disk full?")


def line(record: Environment | Result) -> str:
    """A record as one line of JSON."""
    fields = asdict(record) if isinstance(record, Result) else record.record()
    return json.dumps(plain(fields), ensure_ascii=False, sort_keys=False, allow_nan=False)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: infinities and NaN become words, what is no JSON value its `repr`.

    Results are published, so that paths in texts (of tracebacks) lose what stands before this project and before packages.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return _PLACES.sub("", value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return plain(repr(value))


def parse(text: str) -> Environment | Result:
    """The record on one line; ValueError says what is wrong with any other text."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError(f"a record is a JSON object, not {text[:40]!r}")
    try:
        if "case" not in fields:
            return Environment.parse(fields)
        return Result(**fields | {"status": Status(fields["status"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a record of a result or an environment: {error}") from error


def read(*paths: Path) -> Results:
    """All records of these files; ValueError names the file and line that can't be read.

    A last line without its end, left by a run that was killed while writing, is passed over.
    """
    found = Results()
    for path in paths:
        *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
        for number, text in enumerate(lines, start=1):
            try:
                found.add(parse(text))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    for result in found.by_case.values():
        if result.environment not in found.environments:
            raise ValueError(f"{result.case}: its environment {result.environment!r} is in none of these files")
    return found


def repair(path: Path) -> None:
    """Cut off a last line that has no end, so that the next one to be appended stands alone."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def merged(results: Results) -> Iterable[str]:
    """The lines of one file that holds all of it: environments, then cases, in order of their names."""
    for environment in sorted(results.environments.values(), key=lambda e: (e.date, e.id)):
        yield line(environment)
    for name in sorted(results.by_case):
        yield line(results.by_case[name])
