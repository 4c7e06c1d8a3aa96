"""A report as Markdown: every fact of the page, charts left out, for their numbers stand in tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from reports.document import Block, Cell, Commands, Downloads, Figures, Matrix, Prose, Report, Section, Table

_SIGNS = re.compile(r"([\\`*_\[\]<>|~#&])")


def text(report: Report) -> str:
    """The whole report."""
    parts = [f"# {escaped(report.title)}", *_facts(report.facts)]
    for answer in report.answers:
        parts += [f"**{escaped(answer.question)}** {escaped(answer.words)}", ""]
    parts += [
        f"- **{escaped(c.title)}: {escaped(c.value)}**" + (f" ({escaped(c.detail)})" if c.detail else "")
        for c in report.measured
    ]
    if report.missing:
        parts += ["", f"Not measured in these runs: {escaped('; '.join(report.missing))}."]
    for section in report.sections:
        parts += ["", *_section(section)]
    return "\n".join(parts) + "\n"


def escaped(words: str) -> str:
    """A text whose signs mean themselves, on one line."""
    return _SIGNS.sub(r"\\\1", " ".join(words.split()))


def _facts(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield ""
    yield " · ".join(f"{escaped(name)}: {escaped(value)}" for name, value in facts)
    yield ""


def _section(section: Section) -> Iterator[str]:
    yield f"## {escaped(section.title)}"
    for block in section.blocks:
        lines = list(_block(block))
        if lines:
            yield ""
            yield from lines


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Prose):
        yield escaped(block.text)
    elif isinstance(block, Commands):
        yield escaped(block.caption)
        yield from ("", "```sh", *block.lines, "```")
    elif isinstance(block, Table):
        yield f"### {escaped(block.title)}"
        yield ""
        yield from _table(block.head, block.rows, block.numeric)
    elif isinstance(block, Matrix):
        yield from _matrix(block)
    elif isinstance(block, Downloads):
        rows = tuple(tuple(map(Cell, (f.name, f.size, f.sha256, f.about))) for f in block.files)
        yield from ("### Raw data", "", *_table(("file", "size", "SHA-256", "what"), rows, ("size",)))
    elif not isinstance(block, Figures):
        raise TypeError(f"no words for {block!r}")


def _matrix(matrix: Matrix) -> Iterator[str]:
    yield "; ".join(f"{glyph} {name}: {meaning}" for name, glyph, meaning in matrix.legend)
    yield ""
    rows = [(Cell("all"), *(Cell(s.text if s else "") for s in matrix.total))]
    for _, _, models in matrix.families:
        rows += [(Cell(model), *(Cell(s.text if s else "") for s in squares)) for model, squares in models]
    yield from _table(("model", *matrix.checks), tuple(rows), matrix.checks)


def _table(head: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...], numeric: tuple[str, ...]) -> Iterator[str]:
    yield _row(map(escaped, head))
    yield "|" + "|".join("--:" if name in numeric else "---" for name in head) + "|"
    for row in rows:
        yield _row(map(_cell, row))


def _cell(cell: Cell) -> str:
    if not cell.code:
        return escaped(cell.text)
    lines = (line.replace("|", "\\|") for line in cell.text.split("\n"))
    return "<br>".join(f"{_ticks(line)}{line}{_ticks(line)}" for line in lines)


def _ticks(line: str) -> str:
    return "``" if "`" in line else "`"


def _row(found: Iterable[str]) -> str:
    return "| " + " | ".join(found) + " |"
