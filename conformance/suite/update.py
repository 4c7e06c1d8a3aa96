"""Expectations brought up to date with what a run found; people then edit the reasons and the dates."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

from conformance.suite import expectations
from conformance.suite.cases import Case
from conformance.suite.environment import Environment
from conformance.suite.queries import compact
from conformance.suite.results import Results
from conformance.suite.statuses import Status
from conformance.suite.verdict import judge

HORIZON = datetime.timedelta(days=30)  # how long an entry that nobody has read yet is good for


def update(
    file: Path, folder: Path, selected: list[str], known: Iterable[Case], found: Results, environment: Environment
) -> None:
    """Rewrite one file of expectations so that it fits what was found, the other files of the folder left as they are.

    Entries of the file that are about none of these cases stay; of the others those stay that are true. Each new status
    gets an entry with the result's own reason and a date soon: people then say why, and until when.
    """
    mine, others = [], []
    for entry in expectations.load(folder):
        (mine if entry.where.startswith(f"{file.name} ") else others).append(entry)
    ran = [found.by_case[name] for name in selected if name in found.by_case]
    ran = [result for result in ran if result.status != Status.NOT_SELECTED]
    facts = environment.facts  # an entry whose condition does not hold here is left alone
    kept = [e for e in mine if not e.holds(facts) or all(r.status == e.status for r in ran if e.means(r.case))]
    new: dict[tuple[str, Status, str], list[Case]] = {}
    for result in ran:
        if result.status == Status.PASS or not judge(result, [*kept, *others], environment.facts):
            continue
        case = Case.parse(result.case)
        new.setdefault((case.model, result.status, result.reason), []).append(case)
    condition = f"target={environment.facts['target']}"
    until = datetime.date.fromisoformat(environment.date[:10]) + HORIZON
    all_cases = list(known)
    made = [
        expectations.Expectation(
            tuple(shortest(cases, all_cases)),
            status,
            condition,
            reason or "no reason was given",
            until,
            says=reason if status.is_failure else "",
        )
        for (_, status, reason), cases in new.items()
    ]
    file.write_text(expectations.written([*kept, *made]), encoding="utf-8")
    print(f"{file}: {len(kept)} entries kept, {len(made)} new ones that want a reason and a date from you")


def shortest(cases: list[Case], known: list[Case]) -> list[str]:
    """Queries that mean, of the known cases, exactly these, all of one model: `{check,…}/model/*` where that is true."""
    model = cases[0].model
    whole: list[str] = []
    rest: list[Case] = []
    for check in sorted({case.check for case in cases}):
        some = [case for case in cases if case.check == check]
        every = {case for case in known if (case.check, case.model) == (check, model)}
        if every and every <= set(some):
            whole.append(check)
        else:
            rest += some
    checks = whole[0] if len(whole) == 1 else "{" + ",".join(whole) + "}"
    return [f"{checks}/{model}/*"] * bool(whole) + compact(rest)
