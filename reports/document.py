"""What a report consists of: frozen data, rendered to HTML and to Markdown from the same values."""

from __future__ import annotations

from dataclasses import dataclass, field

NOT_MEASURED = "Not measured"


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `tone` is "good", "bad", "warn", "quiet" or empty, and never says more than the text does."""

    text: str
    tone: str = ""
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under a head. `folded`: the page shows it on demand; `numeric`: the columns set flush right.

    `stacked`: it holds sentences, so that a narrow screen shows a row as a card, and not a table to be scrolled.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: tuple[str, ...] = ()
    folded: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Prose:
    """A paragraph; `tone` as for a cell."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Commands:
    """Command lines under a caption."""

    caption: str
    lines: tuple[str, ...]
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """A chart as SVG; `label` says in words what it shows. Its numbers stand in a table of the same section."""

    title: str
    svg: str
    label: str


@dataclass(frozen=True)
class Figures:
    """Charts side by side, as many as the screen has room for, and a legend that they share: words by swatch."""

    title: str
    figures: tuple[Figure, ...]
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Square:
    """One model under one check: the outcome that is worst, its counts in words, and a line that runs its cases again."""

    outcome: str
    text: str
    title: str
    command: str


@dataclass(frozen=True)
class Matrix:
    """Models by checks, in families; a row has a square, or None, for each check."""

    checks: tuple[str, ...]
    families: tuple[tuple[str, str, tuple[tuple[str, tuple[Square | None, ...]], ...]], ...]
    total: tuple[Square | None, ...]
    legend: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Download:
    """A raw file: where it lies below the report's folder, its size and digest, and its bytes as a data URI if small."""

    name: str
    size: str
    sha256: str
    about: str
    uri: str = ""


@dataclass(frozen=True)
class Downloads:
    """Raw files to download."""

    files: tuple[Download, ...]


Block = Table | Prose | Commands | Figures | Matrix | Downloads


@dataclass(frozen=True)
class Section:
    """A part of the report; `name` is its anchor."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Card:
    """One verdict of the strip."""

    title: str
    value: str
    detail: str = ""
    tone: str = ""
    target: str = ""


@dataclass(frozen=True)
class Answer:
    """A question that a reader comes with, answered in plain sentences; `target`: the section that shows it."""

    question: str
    words: str
    target: str


@dataclass(frozen=True)
class Report:
    """A whole report; `unread` names what lay in the runs and holds no raw results, which is no part of the page."""

    title: str
    facts: tuple[tuple[str, str], ...]
    answers: tuple[Answer, ...]
    cards: tuple[Card, ...]
    sections: tuple[Section, ...] = field(default=())
    unread: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[Card, ...]:
        """The cards that say something."""
        return tuple(c for c in self.cards if c.value.lower() != NOT_MEASURED.lower())

    @property
    def missing(self) -> tuple[str, ...]:
        """What the cards of things that were not measured are about."""
        return tuple(c.title for c in self.cards if c.value.lower() == NOT_MEASURED.lower())


def not_measured(why: str) -> tuple[Block, ...]:
    """What a section says where the runs hold nothing for it."""
    return (Prose(f"{NOT_MEASURED}: {why}", "quiet"),)


def cells(*values: str | Cell) -> tuple[Cell, ...]:
    """A row, from cells and from texts."""
    return tuple(value if isinstance(value, Cell) else Cell(value) for value in values)
