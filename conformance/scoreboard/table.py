"""Answers as tables: systems by questions, systems by difficulties, reasons of refusals, and the taxonomy's rows."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.scoreboard.asking import NOT_ASKED, REFUSED, RIGHT, ROUNDED, TIMEOUT, WARNED, WRONG
from conformance.scoreboard.chosen import SMALL
from conformance.scoreboard.programs import DIFFICULTIES, program
from conformance.scoreboard.questions import QUESTIONS, script
from conformance.scoreboard.records import Record, Results, excuse
from conformance.targets import NAMES

ASKED_OF_A_MODEL_AS_IT_IS = ("captures", "same", "batches", "one", "train", "gradients", "state")
# What `../seeds` call a mechanism, where the text has an opinion: does its capture always succeed, and is its replay sound?
OPINIONS: Mapping[str, tuple[str, bool | None, bool | None]] = {
    "compile_eager": ("out of the box", True, True),
    "jit_script": ("human in the loop", False, None),
    "fx_trace": ("human in the loop", False, None),
    "make_fx": ("human in the loop", False, None),
    "jit_trace": ("best effort", True, False),
}


DOUBTFUL = (WRONG, WARNED)


@dataclass(frozen=True)
class Group:
    """Cases that came to the same, in the same words."""

    outcome: str
    words: str
    excused: str
    cases: tuple[Record, ...]

    @property
    def counted(self) -> bool:
        """Whether it counts against the system, so that each case shows its script."""
        return self.outcome in DOUBTFUL and not self.excused


@dataclass(frozen=True)
class Cell:
    """The cases of one system under one question or difficulty."""

    cases: tuple[Record, ...]

    @property
    def promised(self) -> Counter[str]:
        """How many cases came to which outcome, of those that the system promises."""
        return Counter(c.outcome for c in self.cases if not c.excused)

    @property
    def excused(self) -> Counter[str]:
        """The same, of those that it does not promise."""
        return Counter(c.outcome for c in self.cases if c.excused)

    @property
    def right(self) -> list[str]:
        """The models whose answer is right."""
        return [c.program for c in self.cases if c.outcome in (RIGHT, ROUNDED)]

    @property
    def groups(self) -> list[Group]:
        """The other cases: what counts against the system first, then what costs the most models."""
        found: dict[tuple[str, str, str], list[Record]] = {}
        for case in self.cases:
            if case.outcome not in (RIGHT, ROUNDED):
                found.setdefault((case.outcome, case.words, case.excused), []).append(case)
        groups = [Group(*key, tuple(cases)) for key, cases in found.items()]
        return sorted(groups, key=lambda g: (not g.counted, g.outcome not in (REFUSED, TIMEOUT), -len(g.cases)))

    @property
    def tone(self) -> str:
        """Of the counted cases: "bad" (one is wrong without a word), "warn" (a warning, a timeout), "good" or "quiet"."""
        found = self.promised
        if found[WRONG]:
            return "bad"
        if found[WARNED] or found[TIMEOUT]:
            return "warn"
        return "good" if found[RIGHT] + found[ROUNDED] else "quiet"

    @property
    def score(self) -> int:
        """What the table is sorted by: the right answers, each wrong one outweighs them all."""
        found = self.promised
        return found[RIGHT] + found[ROUNDED] - 10_000 * found[WRONG]

    @property
    def text(self) -> str:
        """The counts in words; what is not promised stands in brackets."""
        parts = words(self.promised)
        others = words(self.excused, differs="differ")
        return " ".join(([", ".join(parts)] if parts else []) + ([f"[{', '.join(others)}]"] if others else [])) or "–"


def words(found: Counter[str], *, differs: str = "WRONG") -> list[str]:
    """Counts of outcomes in words, the right ones first; what `differs` is called is up to whether it was promised."""
    right = found[RIGHT] + found[ROUNDED]
    named = ((REFUSED, "no"), (WRONG, differs), (WARNED, f"{differs.lower()}, warned"), (TIMEOUT, "no answer in time"))
    first = [f"{right} right{f' ({found[ROUNDED]} rounded)' if found[ROUNDED] else ''}"] if right else []
    return first + [f"{found[outcome]} {name}" for outcome, name in named if found[outcome]]


@dataclass(frozen=True)
class System:
    """A row: what the adapter said of itself, and its cases."""

    name: str
    about: Mapping[str, Any]
    records: tuple[Record, ...]

    def cell(self, question: str) -> Cell:
        """The cases of a question."""
        return Cell(tuple(r for r in self.records if r.question == question and r.outcome != NOT_ASKED))

    def difficulty(self, key: str) -> Cell:
        """The cases of models with that difficulty, over the questions about a model that nobody changed."""
        return Cell(
            tuple(
                r
                for r in self.records
                if key in r.difficulties and r.question in ASKED_OF_A_MODEL_AS_IT_IS and r.outcome != NOT_ASKED
            )
        )

    @property
    def programs(self) -> list[str]:
        """The models that it was asked about."""
        return list(dict.fromkeys(r.program for r in self.records))

    @property
    def wrong(self) -> tuple[Record, ...]:
        """What counts against it: promised, and wrong without a word."""
        return tuple(r for r in self.records if r.outcome == WRONG and not r.excused)

    @property
    def reasons(self) -> list[tuple[str, list[str]]]:
        """Why it said no, with the models that this costs; names and numbers are taken out to see what is alike.

        Of the questions about a model as it is, and only where it is promised. A refused capture is told once.
        """
        alike: dict[str, dict[str, None]] = {}
        for r in self.records:
            if r.outcome == REFUSED and r.question in ASKED_OF_A_MODEL_AS_IT_IS and not r.excused:
                text = re.sub(r"'[^']*'|\b\d[\d.]*\b|0x\w+", "…", r.words.removeprefix("at capture: "))[:150]
                alike.setdefault(text, {})[r.program] = None
        return sorted(((text, list(programs)) for text, programs in alike.items()), key=lambda found: -len(found[1]))

    def figure(self, name: str) -> float | None:
        """The median of a figure over the programs that were timed."""
        found = [r.figures[name] for r in self.records if name in r.figures]
        return statistics.median(found) if found else None

    @property
    def capture_in_calls(self) -> float | None:
        """The time of a capture in calls of the model: the median over the programs."""
        found = [r.figures["capture_s"] / r.figures["eager_s"] for r in self.records if r.figures]
        return statistics.median(found) if found else None

    @property
    def most_graphs(self) -> int | None:
        """The largest number of graphs that it kept for one program."""
        found = [int(r.figures["graphs"]) for r in self.records if r.figures]
        return max(found) if found else None


@dataclass(frozen=True)
class Board:
    """All that the page shows."""

    facts: Mapping[str, str]
    systems: tuple[System, ...]
    missing: Mapping[str, str]

    @property
    def programs(self) -> list[str]:
        """The programs that some system was asked about."""
        return list(dict.fromkeys(r.program for s in self.systems for r in s.records))

    @property
    def even(self) -> bool:
        """Whether every system was asked about the same models."""
        return all(set(s.programs) == set(self.programs) for s in self.systems)

    @property
    def toys(self) -> int:
        """How many of the programs were written to be asked about."""
        return sum(name.partition("/")[0] in (*SMALL, "one") for name in self.programs)

    @property
    def difficulties(self) -> list[str]:
        """Those that some program has."""
        found = {d for s in self.systems for r in s.records for d in r.difficulties}
        return [key for key in DIFFICULTIES if key in found]


@dataclass(frozen=True)
class Mechanism:
    """A row of the taxonomy, measured."""

    title: str
    bucket: str
    captured: str
    differed: str
    graphs: str
    capture: str
    replay: str
    memory: str


def board(paths: Sequence[Path]) -> Board:
    """The answers of files; a target that was missing in one and asked in another is not missing."""
    about: dict[str, Any] = {}
    records: dict[tuple[str, str, str], Record] = {}
    missing, facts = {}, {}
    for path in paths:
        results = Results(path)
        about |= {line["target"]: line for line in results.of("target")}
        missing |= {line["target"]: line["words"] for line in results.of("missing")}
        for line in results.of("facts"):
            facts |= {k: v for k, v in line.items() if k != "kind"}
        records |= results.records()
    if not records:
        raise ValueError(
            f"no answers in {', '.join(map(str, paths))}; `python -m conformance.scoreboard run` makes them"
        )
    # As adapters and programs say it now: a disclaimer or a tag that was forgotten does not ask for the answers again.
    for key, r in records.items():
        tags = tuple(sorted(program(r.program).difficulties))
        why = excuse(about[r.target]["disclaims"], tags, r.question)
        records[key] = replace(r, difficulties=tags, excused=why)
    order = {name: number for number, name in enumerate(NAMES)}
    named = sorted(about, key=lambda name: order.get(name, len(NAMES)))
    systems = [System(n, about[n], tuple(r for r in records.values() if r.target == n)) for n in named]
    absent = {name: missing.get(name, "no answers in this run") for name in (*NAMES, *missing) if name not in about}
    return Board(facts, tuple(s for s in systems if s.records), absent)


def taxonomy(systems: Iterable[System]) -> list[Mechanism]:
    """For each system what the data show of the taxonomy's columns; the bucket stands where the text names the mechanism."""
    found = []
    for system in systems:
        captured = system.cell("captures").cases
        made = sum(c.outcome != REFUSED for c in captured)
        held = [r for r in system.records if r.question in ASKED_OF_A_MODEL_AS_IT_IS]
        silent, warned = (len({r.program for r in held if r.outcome == outcome}) for outcome in (WRONG, WARNED))
        bucket, always, sound = OPINIONS.get(system.name, ("", None, None))
        found.append(
            Mechanism(
                str(system.about["title"]),
                bucket or "not in the text",
                f"{made} of {len(captured)}{_held(always, made == len(captured), 'always', 'best effort')}",
                f"{silent} silently, {warned} with a warning{_held(sound, not silent + warned, 'sound', 'unsound')}",
                str(system.most_graphs or "–"),
                _times(system.capture_in_calls, "{:.0f} calls"),
                _times(system.figure("replay_over_eager"), "{:.2f}×"),
                _times(system.figure("peak_over_eager"), "{:.2f}×"),
            )
        )
    return found


def _held(opinion: bool | None, measured: bool, yes: str, no: str) -> str:
    if opinion is None:
        return ""
    said = yes if opinion else no
    return f"; the text says {said}, {'and so it is' if opinion == measured else 'which these models do not show'}"


def _times(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def repeat(record: Record) -> str:
    """The line that repeats a case."""
    return f"python -m conformance.scoreboard repeat {record.target} {record.program} {record.question}"


def shown(record: Record) -> str:
    """The script that shows a wrong case."""
    return script(record.target, record.program, QUESTIONS[record.question])
