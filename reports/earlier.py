"""A comparison with an earlier run: each pair improved, regressed, is noise, is not comparable, vanished or is new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.findings import Speed, Start, speeds, starts
from benchmarks.statistics import FEWEST_PROCESSES, LEAST_DIFFERENCE, Interval, size_of
from benchmarks.variants import EAGER, NOISE
from conformance.suite.cases import Case
from conformance.suite.environment import Environment
from conformance.suite.queries import compact
from reports.document import Block, Cell, Prose, Section, Table, cells, not_measured
from reports.equality import Judged, judged
from reports.outcomes import FAIL, MISSING, PASS, WORST_FIRST
from reports.runs import Run
from reports.speed import NOT_TRIED
from reports.startup import named
from reports.words import one_line, plural, ratio, seconds_interval

REGRESSED, IMPROVED, NOISY, APART, VANISHED, NEW = "regressed", "improved", "noise", "not comparable", "vanished", "new"
CHANGED = (REGRESSED, IMPROVED, VANISHED)
CLASSES = (REGRESSED, IMPROVED, NOISY, APART, VANISHED, NEW)
TONES = {REGRESSED: "bad", IMPROVED: "good", VANISHED: "warn", NOISY: "quiet", APART: "quiet", NEW: ""}
# A process gets the threads that the option says; older runs wrote down the variables of the process that started it.
# What `simd` says follows from `cpu_features`, and older runs don't say it.
MAY_DIFFER = frozenset({"sources", "target", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "simd"})
WORDS = {"option threads": "threads", "option pairs": "rounds", "option settle": "first calls"}


@dataclass(frozen=True)
class Pair:
    """One thing that was measured in either run or both, or several cases: what, the values in words, the class, and why."""

    what: str
    before: str
    now: str
    verdict: str
    why: str = ""
    cases: int = 1


def section(found: list[Pair] | None, cases: list[Pair], conditions: str = "") -> Section:
    """All pairs, those that changed first; None where no earlier run was given. `conditions`: how those of the cases differ."""
    title = "Against an earlier run"
    if found is None:
        return Section("earlier", title, not_measured("no earlier run was given (--baseline RUN)."))
    return Section("earlier", title, tuple(_blocks(found, cases, conditions)))


def conditions(run: Run, baseline: Run) -> str:
    """How the conditions of the suite's cases differ between two runs, in words; empty where they do not."""
    both = [r.results.environments for r in (baseline, run)]
    if not all(both):
        return ""
    before, now = (max(some.values(), key=lambda e: (e.date, e.id)) for some in both)
    return differing(before, now)


def pairs(run: Run, baseline: Run) -> list[Pair]:
    """Speeds and costs at the start, by device, task, model, batch, variant and cache."""
    now, before = (_by_key(r) for r in (run, baseline))
    found = []
    for key in sorted(now.keys() | before.keys(), key=str):
        what = " · ".join(str(part) for part in key if part)
        if key not in now or key not in before:
            (one,) = (now.get(key) or before[key])[-1:]
            new = key in now
            found.append(
                Pair(what, _words(None if new else one), _words(one if new else None), NEW if new else VANISHED)
            )
            continue
        # Where a run holds several environments, the latest two that may be compared are.
        both = [(a, b, _apart(baseline, a, run, b)) for b in reversed(now[key]) for a in reversed(before[key])]
        a, b, apart = next((found for found in both if not found[2]), both[0])
        verdict, why = (APART, apart) if apart else _verdict(a, b)
        found.append(Pair(what, _words(a), _words(b), verdict, why))
    return found


def _by_key(run: Run) -> dict[tuple[str, ...], list[Speed | Start]]:
    """What was measured by what it is; of several environments, that of the newest samples last."""
    newest: dict[str, str] = {}
    for sample in run.records.samples.values():
        newest[sample["environment"]] = max(newest.get(sample["environment"], ""), sample.get("date") or "")
    found: dict[tuple[str, ...], list[Speed | Start]] = {}
    for one in sorted(_all(run), key=lambda one: newest[one.place.environment]):
        found.setdefault(_key(one), []).append(one)
    return found


def _apart(before: Run, old: Speed | Start, now: Run, new: Speed | Start) -> str:
    return differing(
        before.records.environments[old.place.environment], now.records.environments[new.place.environment]
    )


def case_pairs(run: Run, baseline: Run) -> list[Pair]:
    """The cases of the suite that came to something else, those of a model, class and reason together.

    A case can't be noise: one that came to the same is no pair here. The code under test may differ, and so may all conditions.
    """
    now, before = ({str(j.case): j for j in judged(r)} for r in (run, baseline))
    if not now or not before:
        return []
    groups: dict[tuple[str, Pair], list[Case]] = {}
    for name in sorted(now.keys() | before.keys()):
        new, old = now.get(name), before.get(name)
        if new is None or old is None:
            pair = Pair("", _status(old), _status(new), NEW if old is None else VANISHED)
        elif (new.outcome, new.result.status) != (old.outcome, old.result.status):
            why = one_line(new.result.reason, 200)
            pair = Pair("", _status(old), _status(new), _change(old.outcome, new.outcome), why)
        else:
            continue
        case = Case.parse(name)
        groups.setdefault((case.model, pair), []).append(case)
    return [replace(pair, what="\n".join(compact(cases)), cases=len(cases)) for (_, pair), cases in groups.items()]


def _change(before: str, now: str) -> str:
    """The class of a case whose outcome changed; without a result it is there no more than one that was not selected."""
    if before == now:  # another status, neither better nor worse
        return APART
    if MISSING in (before, now):
        return VANISHED if now == MISSING else NEW
    worse = now == FAIL or before == PASS or WORST_FIRST.index(now) < WORST_FIRST.index(before)
    return REGRESSED if worse else IMPROVED


def differing(before: Environment, now: Environment) -> str:
    """Which conditions differ, in words; empty where only the code does, so that the two may be compared."""
    names = sorted(n for n in before.facts.keys() | now.facts.keys() if before.facts.get(n) != now.facts.get(n))
    told = [
        f"{WORDS.get(n, n)} {before.facts.get(n, 'none')} → {now.facts.get(n, 'none')}"
        for n in names
        if n not in MAY_DIFFER
    ]
    return "; ".join(told)


def compared(
    before: Interval, now: Interval, floor: float, processes: int, what: str = "the noise floor"
) -> tuple[str, str]:
    """The class of two intervals: a change counts where they lie apart, beyond 2 % and beyond a floor, which is `what`."""
    if processes < FEWEST_PROCESSES:
        return NOISY, f"{processes} of at least {FEWEST_PROCESSES} processes"
    if before.estimate <= 0 or now.estimate <= 0:
        return NOISY, "an estimate is not above zero"
    change = now.estimate / before.estimate
    if now.low <= before.high and before.low <= now.high:
        return NOISY, "the intervals overlap"
    if size_of(change) <= max(floor, LEAST_DIFFERENCE):
        within = f"{LEAST_DIFFERENCE:.0%}" if floor < LEAST_DIFFERENCE else f"{what} of {floor:.1%}"
        return NOISY, f"{change - 1:+.1%}, within {within}"
    return (REGRESSED if change > 1 else IMPROVED), f"{change - 1:+.1%}"


def _all(run: Run) -> Iterator[Speed | Start]:
    yield from (s for s in speeds(run.records) if s.variant not in (EAGER, NOISE) and _applicable(s))
    yield from (s for s in starts(run.records) if s.variant != EAGER and _applicable(s))


def _applicable(s: Speed | Start) -> bool:
    return not (s.failure or "").startswith(NOT_TRIED)


def _key(s: Speed | Start) -> tuple[str, ...]:
    p, start = s.place, isinstance(s, Start)
    variant = named(s) if isinstance(s, Start) else s.variant
    return p.device, p.task, str(p.model), f"batch {p.batch}", variant, "cost X" if start else "over model(x)"


def _verdict(old: Speed | Start, new: Speed | Start) -> tuple[str, str]:
    wrong = [isinstance(s, Speed) and s.off for s in (old, new)]
    if any(wrong):
        if all(wrong):
            return APART, "its outputs are off from the model's in both"
        return (
            (REGRESSED, "its outputs are off from the model's now") if wrong[1] else (IMPROVED, "they were off before")
        )
    if old.failure or new.failure:
        if old.failure and new.failure:
            return APART, "both failed"
        return (REGRESSED, one_line(new.failure, 200)) if new.failure else (IMPROVED, "it failed before")
    a, b = _interval(old), _interval(new)
    if a is None or b is None:
        return APART, "no value to compare"
    counts = [len(s.ratios) if isinstance(s, Speed) else s.paired for s in (old, new)]
    if isinstance(old, Start) and isinstance(new, Start):  # seconds follow the machine's pace, where ratios do not
        floor = size_of(new.pace.estimate / old.pace.estimate) if old.pace and new.pace else 0.0
        return compared(a, b, floor, min(counts), "the change of the model's own pace")
    floors = [s.against_model.floor for s in (old, new) if isinstance(s, Speed) and s.against_model]
    return compared(a, b, max(floors, default=0.0), min(counts))


def _interval(s: Speed | Start) -> Interval | None:
    if isinstance(s, Start):
        return s.cost
    return s.against_model.ratio if s.against_model else None


def _words(s: Speed | Start | None) -> str:
    if s is None:
        return "—"
    found = _interval(s)
    if found is None:
        return one_line(s.failure or "no value", 120)
    return seconds_interval(found) if isinstance(s, Start) else ratio(found)


def _status(j: Judged | None) -> str:
    return "—" if j is None else f"{j.result.status}"


def _blocks(found: list[Pair], cases: list[Pair], conditions: str) -> Iterator[Block]:
    yield Prose(
        "The same variant on the same model, before and now. A change counts where the two intervals lie apart and it is beyond "
        f"{LEAST_DIFFERENCE:.0%} and the noise floors of both runs; for costs, which are seconds, beyond what the model's own pace "
        "changed. Where device, versions, threads or other conditions differ, speeds and costs are not compared. Cases are, since "
        "each is held against its own model. What is not compared at all: cuts, memory, timings of one process, planted bugs and "
        "random programs."
    )
    if conditions:
        yield Prose(f"Between the cases of the two runs differ: {conditions}.", "warn")
    if not found:
        yield Prose("Neither run holds speeds or costs.", "quiet")
    else:
        yield Prose(f"{plural(len(found), 'pair')}: {counted(found)}.")
        yield from _tables("Speeds and costs", found)
    if cases:
        yield Prose(f"Cases of the suite that came to something else: {counted(cases)}.")
        yield from _tables("Cases of the suite", cases, code=True)
    else:
        yield Prose("No case of the suite changed, or one of the runs holds none.", "quiet")


def counted(found: list[Pair]) -> str:
    """The classes of all pairs, counted."""
    how_many: Counter[str] = Counter()
    for pair in found:
        how_many[pair.verdict] += pair.cases
    return ", ".join(f"{how_many[name]} {name}" for name in CLASSES)


def _tables(title: str, found: list[Pair], code: bool = False) -> Iterator[Table]:
    """What got worse, better or was lost at once; the rest, which asks for nothing, folded."""
    for words, classes, folded in ((", changed", CHANGED, False), (", the rest", (NOISY, APART, NEW), True)):
        some = sorted((p for p in found if p.verdict in classes), key=lambda p: CLASSES.index(p.verdict))
        rows = tuple(
            cells(Cell(p.verdict, TONES[p.verdict]), Cell(p.what, code=code), p.before, p.now, p.why) for p in some
        )
        if rows:
            head = ("class", "what", "before", "now", "change, or why")
            yield Table(f"{title}{words}: {plural(len(rows), 'row')}", head, rows, folded=folded, stacked=True)
