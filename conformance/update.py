"""Expectations brought up to date with what a run found; people then edit the reasons and the dates."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

from conformance import expectations
from conformance.cases import Case
from conformance.environment import Environment
from conformance.queries import compact
from conformance.results import Results
from conformance.statuses import Status
from conformance.verdict import judge

HORIZON = datetime.timedelta(days=30)  # how long an entry that nobody has read yet is good for


def update(file: Path, folder: Path, selected: list[str], found: Results, environment: Environment) -> None:
    """Rewrite one file of expectations so that it fits what was found, the other files of the folder left as they are.

    Entries of the file that are about none of these cases stay; of the others those stay that are true. Each new status
    gets an entry with the result's own reason and a date soon: people then say why, and until when.
    """
    mine, others = [], []
    for entry in expectations.load(folder):
        (mine if entry.where.startswith(f"{file.name} ") else others).append(entry)
    condition = f"target={environment.facts['target']}"
    mentioned = [found.by_case[name] for name in selected if name in found.by_case]
    until = datetime.date.fromisoformat(environment.date[:10]) + HORIZON
    kept: list[expectations.Expectation] = []
    for entry in mine:
        about = [r for r in mentioned if entry.means(r.case)]
        if all(r.status == entry.status for r in about):
            kept.append(entry)
    new: dict[tuple[str, Status, str], list[Case]] = {}
    for result in mentioned:
        if result.status in (Status.PASS, Status.NOT_SELECTED) or not judge(
            result, [*kept, *others], environment.facts
        ):
            continue
        case = Case.parse(result.case)
        new.setdefault((case.model, result.status, result.reason), []).append(case)
    made = [
        expectations.Expectation(line, status, condition, reason or "no reason was given", until)
        for (_, status, reason), cases in new.items()
        for line in compact(cases)
    ]
    entries = [replace(entry, where="") for entry in kept] + made
    file.write_text(expectations.written(entries), encoding="utf-8")
    print(f"{file}: {len(kept)} entries kept, {len(made)} new ones that want a reason and a date from you")
