"""The suite tested: every planted bug is noticed, every check notices one, and every rule of the verdict fires.

`python -m conformance.selftest` runs each mutant against the cases that must notice it, after it has shown that the same
cases pass with Ariadne as it is; it prints what became of each, and exits with 1 if a single one survives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from conformance import checks
from conformance.mutants import MUTANTS
from conformance.suite.bench import Bench
from conformance.suite.cases import Case
from conformance.suite.environment import ROOT, sources
from conformance.suite.selftest_rules import RULES
from conformance.suite.statuses import Status

ARIADNE = "ariadne:prepare_split"
NO_BUG = "conformance.mutants:no_bug"  # what mutants are made of, with nothing planted
FEW = 10  # mutants that one process hunts as fast as two do


@dataclass(frozen=True)
class Trial:
    """What one case came to, against what it must come to."""

    case: str
    must: Status
    found: Status
    reason: str
    says: str = ""

    @property
    def as_it_must(self) -> bool:
        return self.found is self.must and self.says in self.reason


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant: it is killed if every one of its cases came to its status."""

    mutant: str
    breaks: str
    piece: str
    trials: tuple[Trial, ...]

    @property
    def killed(self) -> bool:
        return bool(self.trials) and all(trial.as_it_must for trial in self.trials)


def tried(target: str, must: Mapping[str, Status], says: Mapping[str, str] | None = None) -> tuple[Trial, ...]:
    """Run these cases against a target, model by model; `says` has words that the reason of a case must hold."""
    found: dict[str, Trial] = {}
    benches: dict[str, Bench] = {}
    for case in sorted(map(Case.parse, must), key=lambda case: case.model):
        name = str(case)
        if case.model not in benches:
            benches = {case.model: Bench(case.model, target)}  # of one model at a time
        finding = checks.run(case, benches[case.model])
        found[name] = Trial(name, must[name], finding.status, finding.reason, (says or {}).get(name, ""))
    return tuple(found[name] for name in must)


def hunted(name: str) -> Outcome:
    """Run the cases of one mutant against it."""
    mutant = MUTANTS[name]
    must = {case: notice.status for case, notice in mutant.noticed.items()}
    says = {case: notice.says for case, notice in mutant.noticed.items()}
    return Outcome(name, mutant.breaks, mutant.piece, tried(mutant.target, must, says))


def in_processes(names: list[str], processes: int) -> tuple[list[Trial], list[Outcome]]:
    """What `sound` and `hunted` find of these mutants, spread over processes where there are many."""
    if processes == 1 or len(names) < FEW:
        return sound(names), [hunted(name) for name in names]
    cases = sorted(_cases(names).items(), key=lambda case: Case.parse(case[0]).model)
    shares = [dict(cases[i * len(cases) // processes : (i + 1) * len(cases) // processes]) for i in range(processes)]
    # Forked, so that torch is imported once: nothing has run in this process that would have started a thread.
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        return [t for found in pool.map(_unsound, shares) for t in found], list(pool.map(hunted, names))


def sound(names: Iterable[str]) -> list[Trial]:
    """The cases of these mutants that fail where nothing is planted: a kill by one of them would prove nothing.

    Held against Ariadne as it is, and against what mutants are made of; there all but those that start a process of their own.
    """
    return _unsound(_cases(names))


def _cases(names: Iterable[str]) -> dict[str, Status]:
    return {case: notice.without for name in names for case, notice in MUTANTS[name].noticed.items()}


def _unsound(cases: dict[str, Status]) -> list[Trial]:
    quick = {case: must for case, must in cases.items() if Case.parse(case).check != "source"}
    return [trial for trial in (*tried(ARIADNE, cases), *tried(NO_BUG, quick)) if not trial.as_it_must]


def kills(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Status]]:
    """For each check of the suite, the mutants that it killed and the status that it killed them with."""
    found: dict[str, dict[str, Status]] = {name: {} for name in checks.CHECKS}
    for outcome in outcomes:
        for trial in outcome.trials:
            if trial.as_it_must:
                found[Case.parse(trial.case).check][outcome.mutant] = trial.found
    return found


def table(outcomes: list[Outcome]) -> str:
    """Mutants × checks, each kill by its status; and below what each check killed in all."""
    by_check = kills(outcomes)
    short = {s: s.removeprefix("fail_") for s in Status}
    width = max(len(o.mutant) for o in outcomes)
    widths = {check: max(9, len(check)) for check in by_check}
    lines = [" " * width + "  " + "  ".join(f"{check:{widths[check]}}" for check in by_check)]
    for o in outcomes:
        cells = "  ".join(
            f"{short[by_check[c][o.mutant]] if o.mutant in by_check[c] else '.':{widths[c]}}" for c in by_check
        )
        lines.append(f"{o.mutant:{width}}  {cells}{'' if o.killed else '  SURVIVES'}".rstrip())
    lines.append(f"{'killed':{width}}  " + "  ".join(f"{len(by_check[c]):<{widths[c]}}" for c in by_check).rstrip())
    return "\n".join(lines)


def report(
    outcomes: list[Outcome], unsound: list[Trial], rules: Mapping[str, str | None], seconds: float
) -> dict[str, Any]:
    """The whole selftest as JSON-able data."""
    return {
        "sources": sources(ROOT),
        "mutants": len(outcomes),
        "of": len(MUTANTS),
        "killed": sum(o.killed for o in outcomes),
        "cases": len({trial.case for o in outcomes for trial in o.trials}),
        "checks": {check: len(found) for check, found in kills(outcomes).items()},
        "rules": {"fire": sum(wrong is None for wrong in rules.values()), "of": len(rules)},
        "unsound": [asdict(trial) for trial in unsound],
        "outcomes": [asdict(o) | {"killed": o.killed} for o in outcomes],
        "seconds": round(seconds, 1),
    }


def main(arguments: list[str]) -> int:
    """Do what the command line says; returns an exit status: 0 if all mutants are killed and all rules fire, else 1."""
    parser = argparse.ArgumentParser("python -m conformance.selftest", description=__doc__)
    parser.add_argument("mutants", nargs="*", metavar="MUTANT", help="only these; by default all")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write what was found as one line of JSON")
    parser.add_argument("-n", "--processes", type=int, default=2, help="processes to spread many mutants over (2)")
    parser.add_argument("--list", action="store_true", help="say what each mutant breaks, and run nothing")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.mutants) - MUTANTS.keys())
    if unknown:
        parser.error(f"there is no mutant {unknown[0]!r}; --list shows them")
    if given.list:
        for mutant in MUTANTS.values():
            print(f"{mutant.name} ({mutant.piece}): {mutant.breaks}")
        return 0
    start = time.perf_counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = given.mutants or list(MUTANTS)
    unsound, outcomes = in_processes(names, given.processes)
    rules = {name: rule() for name, rule in RULES.items()}
    return said(outcomes, unsound, rules, time.perf_counter() - start, given.results, whole=not given.mutants)


def said(
    outcomes: list[Outcome], unsound: list[Trial], rules: Mapping[str, str | None], seconds: float, file: Path | None, *,
    whole: bool,
) -> int:  # fmt: skip
    """Print what was found, and write it to a file; returns the exit status."""
    print(table(outcomes))
    for o in outcomes:
        for trial in o.trials:
            if not trial.as_it_must:
                print(f"\n{o.mutant} survives {trial.case}\n  {o.breaks}")
                print(f"  it must come to {trial.must}; it came to {trial.found} {trial.reason}")
    for trial in unsound:
        print(f"\nwithout a bug, {trial.case} is {trial.found}, not {trial.must}: {trial.reason}")
    idle = [check for check, found in kills(outcomes).items() if not found] if whole else []
    for check in idle:
        print(f"\nthe check {check!r} kills no mutant")
    for name, wrong in rules.items():
        if wrong is not None:
            print(f"\nthe rule {name!r} does not fire: {wrong}")
    data = report(outcomes, unsound, rules, seconds)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data) + "\n", encoding="utf-8")
    fire = data["rules"]
    print(f"\n{data['killed']} of {data['mutants']} killed, by {data['cases']} cases that are sound where nothing is planted; "
          f"{fire['fire']} of {fire['of']} rules of the verdict fire; {seconds:.0f} s")  # fmt: skip
    green = data["killed"] == data["mutants"] and fire["fire"] == fire["of"] and not unsound and not idle
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
