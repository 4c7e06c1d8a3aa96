"""The corpus: programs that once failed, and programs written by hand for one hard thing each; JSON files in one folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from conformance.random_networks.program import Program

FOLDER = Path(__file__).parent / "corpus"


def files(folder: Path = FOLDER) -> list[Path]:
    """The programs' files, sorted."""
    return sorted(folder.glob("*.json"))


def load(path: Path) -> Program:
    """The program in a file; ValueError says which file holds none."""
    try:
        return Program.parse(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def save(program: Program, folder: Path = FOLDER) -> Path:
    """Keep a failing program, under a name that follows from its text."""
    text = program.to_json()
    path = folder / f"found_{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    path.write_text(text, encoding="utf-8")
    return path
