"""One run: select cases, run them under pytest, give the verdict."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import model_zoo
from conformance.suite import expectations, lock, results, tiers
from conformance.suite.cases import Case, matches
from conformance.suite.environment import ROOT, Environment, short
from conformance.suite.plan import SUFFIX, Plan
from conformance.suite.queries import in_order, queries
from conformance.suite.report import report
from conformance.suite.statuses import Status
from conformance.suite.supervisor import RUNNER
from conformance.suite.update import update
from conformance.suite.verdict import Problem, verdict


@dataclass(frozen=True)
class Options:
    """What the command line asks of a run."""

    queries: tuple[str, ...] = ()
    tier: str | None = None
    families: tuple[str, ...] = ()
    shard: tuple[int, int] = (1, 1)
    target: str = "ariadne"
    results: Path | None = None
    resume: Path | None = None
    update: Path | None = None
    minutes: float | None = None
    processes: int = 2
    runner: str = RUNNER
    lock: Path = lock.LOCK
    tiers: Path = tiers.FILE
    expectations: Path = expectations.FOLDER


def select(options: Options, known: Iterable[Case]) -> list[Case]:
    """The cases that a run is to have results of: of the lock, those that tier, queries, families and shard all mean.

    A case that is named in full need not be in the lock. ValueError for a query, tier or family that means no case.
    """
    known = list(known)
    chosen = known
    if options.tier is not None:
        available, _ = tiers.load(options.tiers)
        if options.tier not in available:
            raise ValueError(f"there is no tier {options.tier!r}; there are {', '.join(available)}")
        chosen = [case for case in chosen if available[options.tier].selects(case)]
    if options.queries:
        asked = [query for text in options.queries for query in queries(text)]
        for query in asked:
            if query.endswith("*") and not any(matches(query, case) for case in known):
                raise ValueError(f"the query {query!r} means no case; `--list` shows what there is")
        exact = [query for query in asked if not query.endswith("*")]
        prefixes = tuple(query[:-1] for query in asked if query.endswith("*"))
        chosen = [case for case in chosen if prefixes and str(case).startswith(prefixes)]
        chosen = in_order({*chosen, *map(Case.parse, exact)})
    if options.families:
        unknown = sorted({*options.families} - {case.family for case in known})
        if unknown:
            raise ValueError(f"the suite has no cases of {', '.join(unknown)}")
        chosen = [case for case in chosen if case.family in options.families]
    if not chosen:
        raise ValueError(
            "no case is meant by tier, queries and families together; `--list` shows what each of them means"
        )
    return lock.sharded(chosen, options.shard)


def run(options: Options) -> int:
    """Run what the options select, print the verdict, and return an exit status: 0 if the run is green, else 1."""
    start = time.time()
    known = lock.read(options.lock)
    selected = [str(case) for case in select(options, known)]
    entries = expectations.load(options.expectations)
    if options.update and options.update.resolve().parent != options.expectations.resolve():
        raise ValueError(f"{options.update} is not in {options.expectations}, where entries are read from")
    available, limits = tiers.load(options.tiers)
    minutes = options.minutes or (available[options.tier].minutes if options.tier else None)
    now = datetime.datetime.now(datetime.UTC)
    environment = Environment.here(options.target, now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    path = (
        options.resume or options.results or ROOT / "results" / f"{now:%Y%m%d-%H%M%S}-{options.tier or 'cases'}.jsonl"
    )
    done = started(path, environment, resumed=options.resume is not None)
    todo = tuple(running_order([name for name in selected if name not in done]))
    plan = Plan(
        todo, short(options.target), str(path.resolve()), environment.id, environment.facts, limits,
        str(options.expectations.resolve()), start + 60 * minutes if minutes else None, options.runner,
    )  # fmt: skip
    print(f"{len(selected)} cases, {len(selected) - len(todo)} of them done before; results go to {path}", flush=True)
    code = execute(plan, options.processes) if todo else 0
    found = results.read(path).of(environment.id)  # an older result says nothing of what is here now
    universe = {*map(str, known), *selected}
    problems = verdict(selected, universe, found, entries, environment.facts, now.date())
    if options.update:  # after the verdict: what this run wrote itself, nobody has read yet
        update(options.update, options.expectations, selected, known, found, environment)
    statuses = Counter(found.by_case[name].status for name in selected if name in found.by_case)
    if environment.id != Environment.here(options.target, environment.date).id:
        problems.append(Problem("changed", "the sources", "something was edited while the cases ran; run them again"))
    print(report(problems, statuses, time.time() - start, plan.target))
    # pytest's 0 and 1 say that all cases ran, and the verdict has judged them; anything else is trouble of its own.
    return 0 if not problems and code in (0, 1) else 1


def judged(found: results.Results, options: Options) -> int:
    """Print the verdict on results that are there, and return an exit status: 0 if they are green, else 1."""
    known = lock.read(options.lock)
    selected = [str(case) for case in select(options, known)]
    problems = []
    facts = {r.environment: found.environments[r.environment].facts for r in found.by_case.values()}
    today = datetime.datetime.now(datetime.UTC).date()
    entries = expectations.load(options.expectations)
    for given in facts.values() or [{}]:
        problems += verdict((), map(str, known), found, entries, given, today)
    problems += verdict(selected, map(str, known), found, entries, {}, today)
    problems = list(dict.fromkeys(problems))
    statuses = Counter(found.by_case[name].status for name in selected if name in found.by_case)
    targets = {given["target"] for given in facts.values()}
    print(report(problems, statuses, sum(r.seconds for r in found.by_case.values()), ", ".join(sorted(targets))))
    return 1 if problems else 0


def started(path: Path, environment: Environment, *, resumed: bool) -> set[str]:
    """Make the file of results ready to be appended to; returns the cases that have run in this environment already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not resumed and path.exists() and path.stat().st_size:
        raise ValueError(f"{path} holds results; go on with them by --resume {path}, or name a file that is not there")
    done = set()
    if path.exists():
        results.repair(path)
        found = results.read(path)
        done = {
            r.case
            for r in found.by_case.values()
            if r.environment == environment.id and r.status != Status.NOT_SELECTED
        }
        if environment.id in found.environments:
            return done
    results.append(path, environment)
    return done


def running_order(cases: Sequence[str]) -> list[str]:
    """The cases with those of heavy models first: the last model to be run keeps one process busy, and leaves the others idle.

    Of one check of a model, those that differ in the cut alone come together: the whole model is the same for all of them.
    """
    known = set(model_zoo.names())
    places: dict[tuple[str, str], int] = {}

    def place(name: str) -> tuple[int, int, list[tuple[str, str]]]:
        case = Case.parse(name)
        tags = model_zoo.entry(case.model).tags if case.model in known else frozenset[str]()
        cost = next((i for i, tag in enumerate(("heavy", "medium")) if tag in tags), 2)
        first = places.setdefault((case.model, case.check), len(places))
        return cost, first, [pair for pair in case.parameters if pair[0] != "cut"]

    return sorted(cases, key=place)


def execute(plan: Plan, processes: int) -> int:
    """Run a plan under pytest, in this process if there is one model only; returns pytest's exit status."""
    workers = min(processes, len({Case.parse(name).model for name in plan.cases}))
    with tempfile.TemporaryDirectory(prefix="ariadne-conformance-") as folder:
        file = Path(folder) / f"cases{SUFFIX}"
        plan.write(file)
        arguments = [
            "-q",
            "-rfE",
            "--tb=short",
            "--noconftest",
            f"--rootdir={ROOT}",
            "-c",
            str(ROOT / "pyproject.toml"),
        ]
        arguments += ["-o", "addopts=", "-o", "faulthandler_timeout=0", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        arguments += ["-p", "conformance.suite.plugin"]
        arguments += (
            ["-n", str(workers), "--dist", "loadgroup", "--no-loadscope-reorder"] if workers > 1 else ["-p", "no:xdist"]
        )
        return int(pytest.main([*arguments, str(file)]))
