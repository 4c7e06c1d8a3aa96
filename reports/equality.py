"""Models by checks: what the conformance suite found, and the lines that run it again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from conformance.suite.cases import Case
from conformance.suite.queries import compact
from conformance.suite.report import reproduce
from conformance.suite.results import Result
from conformance.suite.verdict import expected, judge
from reports import compared
from reports.document import Block, Cell, Matrix, Prose, Section, Square, Table, cells, not_measured
from reports.outcomes import EXPECTED, FAIL, GLYPHS, MEANINGS, MISSING, PASS, TONES, UNEXPECTED, WORST_FIRST, outcome
from reports.runs import Run
from reports.words import one_line, plural


@dataclass(frozen=True)
class Judged:
    """A result, what it counts as, and the reason of the expectation about it, if there is one."""

    case: Case
    result: Result
    outcome: str
    known: str
    target: str

    @property
    def command(self) -> str:
        """The line that runs this case again."""
        return reproduce(self.case, self.target)[1]


def judged(run: Run) -> list[Judged]:
    """Every result with its outcome, by name."""
    found = []
    for name, result in sorted(run.results.by_case.items()):
        facts = run.results.environments[result.environment].facts
        problem = judge(result, run.expectations, facts)
        entry = expected(name, run.expectations, facts)
        known = f"{entry.reason} (until {entry.until})" if entry else ""
        if entry and problem:
            known = f"not so: {entry.status} was expected, {known}"
        found.append(Judged(Case.parse(name), result, outcome(result.status, problem), known, facts["target"]))
    return found


def counts(found: list[Judged]) -> Counter[str]:
    """How many results count as each outcome."""
    return Counter(j.outcome for j in found)


def section(run: Run, found: list[Judged]) -> Section:
    """The matrix, every case that failed with its line, and every other that is no pass."""
    return Section("equality", "Is the split model equal to the whole?", tuple(_blocks(run, found)))


def _blocks(run: Run, found: list[Judged]) -> Iterator[Block]:
    yield from compared.blocks(run)
    if not found:
        if not run.compared:
            yield from not_measured("the runs hold no results of the conformance suite.")
        return
    how_many = counts(found)
    listed = ", ".join(f"{how_many[name]:,} {name}" for name in (PASS, FAIL, EXPECTED, UNEXPECTED, MISSING))
    models = len({j.case.model for j in found})
    yield Prose(
        f"{plural(len(found), 'case')} of {plural(models, 'model')}: {listed}. The suite has {run.suite:,} cases; "
        f"{run.suite - len({str(j.case) for j in found}):,} of them were no part of these runs. They took "
        f"{sum(j.result.seconds for j in found) / 60:,.0f} minutes of one core. Open a cell for "
        "the line that runs it again, python -m conformance --case 'CHECK/MODEL/*'."
    )
    yield _matrix(found)
    failed = [j for j in found if j.outcome in (FAIL, UNEXPECTED)]
    if failed:
        yield _list("Every case that failed or was not expected", failed)
    else:
        yield Prose("No case failed, and none was unexpected.", "good")
    others = [j for j in found if j.outcome in (EXPECTED, MISSING)]
    if others:
        yield _list("Expected not to be equal, or not run", others, folded=True)


def _matrix(found: list[Judged]) -> Matrix:
    by_model: dict[str, dict[str, list[Judged]]] = defaultdict(lambda: defaultdict(list))
    for j in found:
        by_model[j.case.model][j.case.check].append(j)
    checks = tuple(sorted({j.case.check for j in found}))
    families: dict[str, list[tuple[str, tuple[Square | None, ...]]]] = defaultdict(list)
    for model in sorted(by_model):
        row = tuple(_square(f"{check}/{model}/*", by_model[model].get(check, [])) for check in checks)
        families[model.partition("/")[0]].append((model, row))
    total = tuple(_square(f"{check}/*", [j for j in found if j.case.check == check]) for check in checks)
    legend = tuple((name, GLYPHS[name], MEANINGS[name]) for name in (PASS, FAIL, UNEXPECTED, EXPECTED, MISSING))
    summaries = {f: counts([j for j in found if j.case.family == f]) for f in families}
    described = tuple(
        (name, f"{plural(len(rows), 'model')}, {_words(summaries[name])}", tuple(rows))
        for name, rows in sorted(families.items())
    )
    return Matrix(checks, described, total, legend)


def _square(query: str, some: list[Judged]) -> Square | None:
    if not some:
        return None
    how_many = counts(some)
    worst = next(name for name in WORST_FIRST if how_many[name])
    number = f"{how_many[worst]}" if worst == PASS else f"{how_many[worst]}/{len(some)}"
    which = some if worst == PASS else [j for j in some if j.outcome == worst]
    command = which[0].command if len(which) == 1 else _command(query, which[0].target)
    return Square(worst, f"{GLYPHS[worst]} {number}", _words(how_many), command)


def _command(query: str, target: str) -> str:
    return f"python -m conformance --case '{query}'" + ("" if target == "ariadne" else f" --target {target}")


def _words(how_many: Counter[str]) -> str:
    return ", ".join(f"{how_many[name]:,} {name}" for name in (PASS, *WORST_FIRST[:-1]) if how_many[name])


def _list(title: str, some: list[Judged], folded: bool = False) -> Table:
    """The cases of a model that came to the same for the same reason in one row, and a line for each row."""
    groups: dict[tuple[str, str, str, str], list[Judged]] = defaultdict(list)
    for j in some:
        groups[j.case.model, j.result.status, one_line(j.result.reason), j.known].append(j)
    rows = []
    worst = sorted(groups.items(), key=lambda g: (WORST_FIRST.index(g[1][0].outcome), g[0]))
    for (_, status, reason, known), same in worst:
        lines = compact([j.case for j in same])
        commands = "\n".join(_command(line, same[0].target) for line in lines)
        mark = Cell(f"{GLYPHS[same[0].outcome]}\u00a0{status}", TONES[same[0].outcome])
        rows.append(cells(mark, str(len(same)), Cell(commands, code=True), reason, known or "not expected"))
    head = ("status", "cases", "run again with", "found", "expected, since")
    return Table(f"{title}: {plural(len(some), 'case')}", head, tuple(rows), ("cases",), folded, stacked=True)
