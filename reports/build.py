"""Folders of raw results in, a report's folder out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks import findings
from benchmarks.findings import Mean, Place, Speed, Start, versus, versus_each
from benchmarks.variants import AHEAD, COMPILE, DEFAULT
from conformance.suite.environment import Environment
from reports import (
    answers,
    boundary,
    earlier,
    equality,
    frames,
    markdown,
    methods,
    page,
    payback,
    raw,
    runs,
    speed,
    startup,
    timings,
    verdicts,
    whole_zoo,
)
from reports.document import Card, Report, Section
from reports.runs import RawFile, Run

PAIRS = (
    ("compiled", COMPILE),
    (DEFAULT, COMPILE),
    (AHEAD, COMPILE),
    ("compiled reduce-overhead", f"{COMPILE} reduce-overhead"),
    ("compiled reduce-overhead fixed", f"{COMPILE} reduce-overhead"),
)


def build(folders: Sequence[Path], baseline: Path | None, output: Path) -> Report:
    """Write `index.html`, `summary.md` and `data/` into `output`; ValueError says what is wrong with the raw results.

    What an earlier report left in `output` is replaced; a `data/` there that is no report's is refused.
    """
    _refuse(output, [*folders, *([baseline] if baseline else [])])
    run = runs.read(folders)
    before = runs.read([baseline]) if baseline is not None else None
    if before is not None and not any(before.folders):
        raise ValueError(f"{baseline}: expected an earlier run to compare with, found a folder without raw results")
    report, files = made(run, before)
    _write(output, files, {"index.html": page.html(report), "summary.md": markdown.text(report)})
    return report


def made(run: Run, baseline: Run | None) -> tuple[Report, Mapping[str, RawFile]]:
    """The report, and the files that are kept beside it by their path in its folder."""
    return _made(run, baseline, drawn=True)


def outline(run: Run) -> Report:
    """The report without its sections, which have the charts: what it is about, its answers and its cards."""
    return _made(run, None, drawn=False)[0]


def _made(run: Run, baseline: Run | None, *, drawn: bool) -> tuple[Report, Mapping[str, RawFile]]:
    found = equality.judged(run)
    speeds = findings.speeds(run.records)
    means, starts = findings.means(speeds), findings.starts(run.records)
    against = [m for pair in PAIRS for m in versus(run.records, *pair)]
    each = [s for pair in PAIRS for s in versus_each(run.records, *pair)]
    pairs = earlier.pairs(run, baseline) if baseline else None
    cases = earlier.case_pairs(run, baseline) if baseline else []
    kept: Mapping[str, RawFile] = {}
    if drawn:
        tables = frames.tables(found, speeds, means + against, starts, boundary.cuts(run.records), pairs or [])
        kept = raw.kept(run, baseline, tables)
    named = naming(one.place for one in (*speeds, *starts))
    each = told_apart([s for s in each if not (s.failure or "").partition(": ")[2].startswith(speed.NOT_TRIED)], named)
    graphs = [(named(p), name, by_batch) for p, name, by_batch in findings.recompilations(run.records)]
    against = told_apart([m for m in against if speed.tried(m)], named)
    speeds, means, starts = (told_apart(some, named) for some in (speeds, means, starts))
    sections: tuple[Section, ...] = ()
    if drawn:
        sections = (
            equality.section(run, found),
            *whole_zoo.sections(run.records),
            speed.section("inference", speeds, means, against, each, graphs),
            startup.section(starts),
            payback.section(starts),
            boundary.section(run.records),
            speed.section("training", speeds, means, against, each, graphs),
            timings.section(run.timings),
            earlier.section(pairs, cases, earlier.conditions(run, baseline) if baseline else ""),
            methods.section(run, baseline, raw.downloads(kept)),
        )
    cards: tuple[Card, ...] = tuple(verdicts.strip(run, found, speeds, means, against, starts, graphs, pairs, cases))
    told = answers.answers(run, found, speeds, means, starts)
    return Report(TITLE, facts(run), told, cards, sections, run.unread), kept


TITLE = "Ariadne: what was shown, and how fast it is"
Found = TypeVar("Found", Speed, Mean, Start)


def told_apart(found: Sequence[Found], named: Callable[[Place], Place]) -> list[Found]:
    """The findings, at places as `named` names them."""
    return [replace(one, place=named(one.place)) for one in found]


def naming(places: Iterable[Place]) -> Callable[[Place], Place]:
    """What puts the environment's id beside a place's device where among these places several environments have that."""
    environments: dict[str, set[str]] = {}
    for place in places:
        environments.setdefault(place.device, set()).add(place.environment)

    def named(place: Place) -> Place:
        several = len(environments[place.device]) > 1
        return replace(place, device=f"{place.device} in {place.environment}") if several else place

    return named


def facts(run: Run) -> tuple[tuple[str, str], ...]:
    """When, where and with what: the line under the title, all of it from the data."""
    environments = run.environments
    samples = run.records.samples.values()
    dates = sorted({*(e.date[:10] for e in environments), *(str(s["date"])[:10] for s in samples if s.get("date"))})
    commits = sorted(
        {c[:12] for c in (*(str(s.get("commit") or "") for s in samples), *(t.commit for t in run.timings)) if c}
    )
    tested = [*run.results.environments.values()]
    return (
        ("when", " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "nothing was measured"),
        ("device", _distinct(environments, lambda e: e.facts.get("gpu") or e.facts.get("cpu") or "unknown")),
        ("cores, threads", _distinct(environments, _threads)),
        ("torch", _distinct(environments, lambda e: e.facts.get("torch", "unknown"))),
        ("Python", _distinct(environments, lambda e: e.facts.get("python", "unknown"))),
        ("commit of the measurements", ", ".join(commits) or "none"),
        ("sources of the suite's cases", _distinct(tested, lambda e: e.facts.get("sources", "")) if tested else "none"),
    )


def _threads(environment: Environment) -> str:
    known = environment.facts
    return f"{known['cores']}, {known['option threads']}" if {"cores", "option threads"} <= known.keys() else ""


def _distinct(environments: Sequence[Environment], take: Callable[[Environment], str]) -> str:
    return " / ".join(dict.fromkeys(filter(None, map(take, environments)))) or "unknown"


def _refuse(output: Path, folders: Sequence[Path]) -> None:
    """ValueError where writing would take away what is no report's, or what is to be read."""
    data, page_there = output / "data", output / "index.html"
    if (data.exists() or page_there.exists()) and not _is_report(page_there):
        there = data if data.exists() else page_there
        raise ValueError(f"{there} is there, and {output} holds no report to replace; give another --output")
    for folder in folders:
        if folder.resolve().is_relative_to(data.resolve()):
            raise ValueError(
                f"{folder} lies in the data of {output}, which this report would replace; give another --output"
            )


def _is_report(file: Path) -> bool:
    """Whether a file is the page of a report, whose title those of before the generator was named have, too."""
    if not file.is_file():
        return False
    head = file.read_bytes()[:2000].decode(errors="replace")
    return f'<meta name="generator" content="{page.GENERATOR}">' in head or f"<title>{TITLE}</title>" in head


def _write(output: Path, files: Mapping[str, RawFile], texts: Mapping[str, str]) -> None:
    if (output / "data").exists():
        shutil.rmtree(output / "data")
    output.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    for name, text in texts.items():
        (output / name).write_text(text, encoding="utf-8", newline="\n")
