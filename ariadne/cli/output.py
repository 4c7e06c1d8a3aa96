"""Answers: text for people, one JSON document for programs; tables, colours and progress."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

OK, FAILED, USAGE, NO_PLAN = 0, 1, 2, 3
GOOD, BAD, DOUBTFUL = "pass ok yes loaded".split(), "FAIL fail failed missing".split(), "refused skipped never".split()
_COLOURS = {"32": GOOD, "31": BAD, "33": [*DOUBTFUL, "nondeterministic"]}


class UsageError(Exception):
    """An invalid option, input or name of a model; exit status 2."""


class ModelError(Exception):
    """A model that can't be made or run; exit status 3."""


@dataclass(frozen=True)
class Answer:
    """What a command found: text, the same as JSON-able data, and the exit status."""

    text: str
    data: Mapping[str, Any]
    status: int = OK

    def json(self) -> str:
        """The data as one JSON document; numbers that JSON has no word for are null."""
        return json.dumps(_plain(self.data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], gap: str = "  ") -> str:
    """Rows under heads, in columns as wide as they need to be; those of numbers, and of heads that begin with `>`, to the right."""
    cells = [[cell(v) for v in row] for row in rows]
    numeric = [h[:1] == ">" or all(type(row[i]) in (int, float) for row in rows) for i, h in enumerate(heads)]
    heads = [h.removeprefix(">") for h in heads]
    widths = [max(len(row[i]) for row in [list(heads), *cells]) for i in range(len(heads))]
    return "\n".join(
        gap.join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [list(heads), *cells]
    )


def cell(value: Any) -> str:
    """A value as a table shows it: yes and no, thousands apart, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def paint(text: str) -> str:
    """The text with its verdicts coloured, where stdout is a terminal that may have colours (`NO_COLOR` is unset)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    for code, words in _COLOURS.items():
        text = re.sub(rf"(?<=  )({'|'.join(words)})(?=  |$)", rf"\033[{code}m\1\033[0m", text, flags=re.MULTILINE)
    return text


class Progress:
    """One line on stderr that says what is going on; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __call__(self, words: str) -> None:
        if self.shown:
            sys.stderr.write(f"\r\033[K{words[:100]}")
            sys.stderr.flush()

    def done(self) -> None:
        """Take the line away."""
        self("")
        if self.shown:
            sys.stderr.write("\r")


@contextmanager
def progress(words: str) -> Iterator[Progress]:
    """Progress during a block, from these words on."""
    line = Progress()
    line(words)
    try:
        yield line
    finally:
        line.done()
