"""One page that leads through all published runs, newest first: when, where, of which code, and what each shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reports.build import outline
from reports.document import Report
from reports.page import index_html
from reports.runs import read


@dataclass(frozen=True)
class Published:
    """A published run: its folder's name, and its report made again from its own raw results."""

    name: str
    report: Report


def published(root: Path) -> list[Published]:
    """Every run below a folder, newest first; ValueError where a folder holds no raw results."""
    found = []
    for folder in sorted((p for p in root.iterdir() if p.is_dir()), reverse=True):
        data = folder / "data/1"
        if not data.is_dir():
            raise ValueError(f"{folder}: expected the raw results of a report in data/1, found none")
        found.append(Published(folder.name, outline(read([data]))))
    return found


def write(root: Path) -> Path:
    """Write `index.html` into a folder of published runs; returns its path.

    >>> write(Path("reports/published"))
    PosixPath('reports/published/index.html')
    """
    path = root / "index.html"
    path.write_text(index_html(published(root)), encoding="utf-8", newline="\n")
    return path
