"""The board as one HTML page that loads nothing: each cell leads to its cases, each case has the line that repeats it."""

from __future__ import annotations

import base64
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import jinja2

from conformance.scoreboard import again, runner, table
from conformance.scoreboard.programs import DIFFICULTIES
from conformance.scoreboard.questions import QUESTIONS
from conformance.scoreboard.records import Results

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(enabled_extensions=("html.jinja",)),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def write(paths: Sequence[Path], output: Path) -> int:
    """Write `index.html`, `summary.md` and copies of the answers; returns how many wrong cells Ariadne's own row has."""
    board = table.board(paths)
    output.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if path.resolve().parent != output.resolve():
            shutil.copy(path, output / path.name)
    names = [path.name for path in paths]
    known, same = again.repeated(board, paths)
    wrong = sum(len(system.wrong) for system in board.systems)
    scripts = f"{wrong} cases are wrong where it is promised; the scripts of {known} were run again, and {same} printed the same."
    for name in ("index.html", "summary.md"):
        (output / name).write_text(render(board, names, f"{name}.jinja", scripts), encoding="utf-8", newline="\n")
    return sum(len(system.wrong) for system in board.systems if system.about["package"] == "ariadne-runtime")


def publish(path: Path, output: Path) -> int:
    """The page of the models that every system of a file was asked about, and their answers; returns what `write` does."""
    results = Results(path)
    asked: dict[str, set[str]] = {}
    for target, program, question in results.records():
        if question == runner.TIME:  # the last one
            asked.setdefault(target, set()).add(program)
    results.kept(set.intersection(*asked.values()), output / path.name)
    return write([output / path.name], output)


def render(board: table.Board, raw: Sequence[str], template: str, scripts: str) -> str:
    """The page over a board, from a template beside this file."""
    sorting = (Path(__file__).parent / "sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(sorting.encode()).digest()).decode()
    return _ENVIRONMENT.get_template(template).render(
        board=board,
        sorting=sorting,
        sorting_hash=f"sha256-{digest}",  # the only script that the page may run
        questions=list(QUESTIONS.values()),
        difficulties={key: DIFFICULTIES[key] for key in board.difficulties},
        taxonomy=table.taxonomy(board.systems),
        repeat=table.repeat,
        shown=table.shown,
        raw=raw,
        scripts=scripts,
    )
