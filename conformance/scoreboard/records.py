"""The answers in a file of JSON lines: what is there is not asked again, and a line cut short counts as not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One case: a target, a program and a question, and what it came to.

    `excused`: why it is not promised; empty where it is, and only then it is counted. `figures`: of the question "time".
    """

    target: str
    program: str
    question: str
    outcome: str
    words: str = ""
    excused: str = ""
    difficulties: tuple[str, ...] = ()
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What the case is about."""
        return self.target, self.program, self.question


def excuse(disclaims: Mapping[str, str], difficulties: Iterable[str], question: str) -> str:
    """Why a target doesn't promise the answer to a question about a program with these difficulties; empty where it does."""
    keys = [question, *sorted(difficulties), *(f"{question}/{key}" for key in sorted(difficulties))]
    return next((f"{key}: {disclaims[key]}" for key in keys if key in disclaims), "")


class Results:
    """A file of results. `facts` hold for all that follows them: versions, machine, date."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> Iterator[dict[str, Any]]:
        """Every whole line; the last one may have been cut short when its process ended."""
        if not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.path}:{number}: expected a JSON object in each line, found {line[:60]!r}"
                ) from error

    def records(self) -> dict[tuple[str, str, str], Record]:
        """The answers by case, the later of two."""
        found = {}
        for line in self.lines():
            if line["kind"] == "answer":
                fields = {k: v for k, v in line.items() if k != "kind"}
                record = Record(**{**fields, "difficulties": tuple(fields.get("difficulties", ()))})
                found[record.key] = record
        return found

    def kept(self, programs: Iterable[str], path: Path) -> None:
        """Write a file of the answers about these programs, without what can be worked out again and what was asked twice."""
        programs = set(programs)
        lines = {(line["kind"], line.get("target")): line for line in self.lines() if line["kind"] != "answer"}
        lines = {key: line for key, line in lines.items() if key[0] in ("facts", "target", "missing")}
        again = {(x["target"], x["program"], x["question"]): x for x in self.of("again") if x["program"] in programs}
        derived = ("excused", "difficulties")
        answers = [
            {"kind": "answer"} | {k: v for k, v in asdict(record).items() if v and k not in derived}
            for record in self.records().values()
            if record.program in programs
        ]
        text = "".join(json.dumps(line) + "\n" for line in [*lines.values(), *answers, *again.values()])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The other lines of one kind: "facts", "target" or "missing"."""
        return [line for line in self.lines() if line["kind"] == kind]

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one line; it outlives the process."""
        self._mend()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def add(self, record: Record) -> None:
        """Append an answer."""
        self.write("answer", asdict(record))

    def _mend(self) -> None:
        """Take away a line that was cut short."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() == b"\n":
                return
        data = self.path.read_bytes()
        self.path.write_bytes(data[: data.rfind(b"\n") + 1])
