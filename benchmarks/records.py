"""Raw results: JSON lines, environments and samples, appended as they come and read back.

`{"environment": id, "date": …, "facts": {…}}` stands before the samples that were taken there. A sample is
`{"environment": id, "date": …, "load": […], "job": …, "task": …, "device": …, "model": …, "batch": …, "variant": …,
"process": …, "token": …, "status": …, …}`: with "ok" all raw times are in it, with any other status ("failed", "crashed",
"timed out", "absent", "not applicable") the reason is. `process` counts from 0; samples of one token ran in one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.suite.environment import Environment
from conformance.suite.results import plain, repair

Record = dict[str, Any]
Key = tuple[Any, ...]
STATUSES = ("ok", "failed", "crashed", "timed out", "absent", "not applicable")


@dataclass
class Records:
    """The samples of one or several files, each key once (the newest counts), and their environments."""

    environments: dict[str, Environment] = field(default_factory=dict)
    samples: dict[Key, Record] = field(default_factory=dict)

    def of(self, job: str) -> list[Record]:
        """The samples of one kind of job."""
        return [s for s in self.samples.values() if s["job"] == job]


def key(sample: Record) -> Key:
    """What tells samples apart; the environment is part of it, so that runs of two machines stay two."""
    names = ("environment", "job", "task", "device", "model", "batch", "variant", "cache", "process")
    return tuple(sample.get(name) for name in names)


def append(path: Path, records: Iterable[Environment | Record]) -> None:
    """Append lines in one write, so that a job's samples are in the file together or not at all."""
    lines = [r.record() if isinstance(r, Environment) else r for r in records]
    data = "".join(json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        repair(path)
    with open(path, "ab", buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError(f"{path}: not all was written; is the disk full?")
        os.fsync(file.fileno())


def read(*paths: Path) -> Records:
    """All records of these files; ValueError names the file and line that can't be read. An unfinished last line is skipped."""
    found = Records()
    for path in paths:
        *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
        for number, text in enumerate(lines, start=1):
            try:
                _take(found, json.loads(text))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: no record of a benchmark: {error!r}") from error
    return found


def _take(found: Records, record: Record) -> None:
    if "facts" in record:
        environment = Environment.parse(record)
        found.environments.setdefault(environment.id, environment)
        return
    if record["status"] not in STATUSES:
        raise ValueError(f"status {record['status']!r} is none of {', '.join(STATUSES)}")
    if record["environment"] not in found.environments:
        raise ValueError(f"its environment {record['environment']!r} does not stand before it")
    before = found.samples.get(key(record), {})
    if not before.get("date", "") > record.get("date", ""):  # of equal dates the last one
        found.samples.pop(key(record), None)  # so that they stand in the order in which they were measured
        found.samples[key(record)] = record
