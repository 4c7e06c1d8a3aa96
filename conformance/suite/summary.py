"""The page docs/conformance.md, made from files of results: models × checks, and every case that is no pass, with its reason."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from conformance.suite import expectations, lock, results, tiers
from conformance.suite.cases import Case
from conformance.suite.queries import compact
from conformance.suite.results import Result, Results
from conformance.suite.statuses import Status
from conformance.suite.verdict import expected, judge

LONGEST = 240  # of a reason, in characters
# Facts by which a check says that it left out a part: what that is.
PARTS = {
    "not_trained": "training",
    "tied_unchecked": "gradients of tied parameters over the wire",
    "whole_takes_no_two_in_flight": "two steps in flight",
    "inexact": "training at so many cuts, which the runtime refuses",
    "trained_elsewhere": "training across the cut that was asked for, which the runtime refuses",
}


def main(arguments: list[str]) -> int:
    """Print the page; returns an exit status."""
    parser = argparse.ArgumentParser("python -m conformance summary", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="files of results: JSON lines")
    parser.add_argument("--tier", help="say that this is the whole of a tier; refused where cases of it have no result")
    parser.add_argument("--selftest", type=Path, help="what the selftest wrote; its last line counts")
    parser.add_argument("--fuzz", type=Path, help="what the random programs wrote; all lines count")
    for name, default in (("expectations", expectations.FOLDER), ("lock", lock.LOCK), ("tiers", tiers.FILE)):
        parser.add_argument(f"--{name}-from", type=Path, default=default, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    selftest, fuzz = (
        [json.loads(t) for t in p.read_text().splitlines()] if p else [] for p in (given.selftest, given.fuzz)
    )
    found = results.read(*given.results)
    found.hold_single()
    found.hold_of_one_code()
    _hold_figures(found, selftest[-1:], fuzz)
    if given.tier is not None:
        _hold_whole(found, given)
    print(page(found, expectations.load(given.expectations_from), selftest[-1:], fuzz, given.tier), end="")
    return 0


def _hold_whole(found: Results, given: argparse.Namespace) -> None:
    """Raise ValueError unless these are results of all cases of a tier, and of no others."""
    available, _ = tiers.load(given.tiers_from)
    if given.tier not in available:
        raise ValueError(f"there is no tier {given.tier!r}; there are {', '.join(available)}")
    wanted = {str(case) for case in lock.read(given.lock_from) if available[given.tier].selects(case)}
    ran = {name for name, r in found.by_case.items() if r.status != Status.NOT_SELECTED}
    for what, names in (("have no result", wanted - ran), ("are none of its cases", found.by_case.keys() - wanted)):
        if names:
            raise ValueError(f"tier {given.tier}: {len(names)} {what}, {min(names)} for one")


def _hold_figures(found: Results, selftest: Iterable[dict[str, Any]], fuzz: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError where a selftest was partial or unsound, or where it or the random programs ran on other code."""
    for line in selftest:
        if line["mutants"] != line["of"] or line["unsound"]:
            raise ValueError(
                f"a selftest of {line['mutants']} of {line['of']} mutants, with {len(line['unsound'])} cases that are not sound, "
                "says nothing of the suite; run all of it"
            )
    code = {found.environments[r.environment].facts["sources"] for r in found.by_case.values()}
    for line in (*selftest, *fuzz):
        if code and line.get("sources") not in code:
            raise ValueError(
                f"the selftest or the random programs ran on the code {line.get('sources')}, the cases on {min(code)}"
            )


def page(
    found: Results,
    entries: list[expectations.Expectation],
    selftest: Iterable[dict[str, Any]] = (),
    fuzz: Iterable[dict[str, Any]] = (),
    tier: str | None = None,
) -> str:
    """The whole page; the same text for the same records, in whatever order they came."""
    ran = [found.by_case[name] for name in sorted(found.by_case)]
    parts = [
        "# Conformance: results\n",
        "<!-- made by `python -m conformance summary`; change the data, not this page -->\n",
        "Whether a model that is split equals the model whole, case by case. A cell counts passes and cases; the list below\n"
        "names every case that is no pass. What the checks, statuses and tiers are: "
        "[decision 6](decisions/0006-conformance.md).\n",
        _totals(ran, tier),
        *_figures(selftest, fuzz),
        _environments(found),
        "## Models × checks\n",
        _table(ran),
        "## What is not a pass\n",
        _others(ran, entries, found),
        "## Passes that left a part out\n",
        _partly(ran),
    ]
    return "\n".join(part for part in parts if part)


def _totals(ran: list[Result], tier: str | None) -> str:
    counts = Counter(r.status for r in ran)
    models = {Case.parse(r.case).model for r in ran}
    minutes = sum(r.seconds for r in ran) / 60
    listed = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    which = f"all cases of the tier {tier}" if tier else "not a whole tier"
    return (
        f"**{len(ran)} cases of {len(models)} models: {listed}.** These are {which}.\n"
        f"They took {minutes:.0f} minutes of one core, without the building of models.\n"
    )


def _figures(selftest: Iterable[dict[str, Any]], fuzz: Iterable[dict[str, Any]]) -> Iterator[str]:
    for line in selftest:
        rules = line["rules"]
        yield (
            f"**Mutants killed: {line['killed']} of {line['mutants']}**, bugs planted in the runtime that the suite must notice; "
            f"{rules['fire']} of {rules['of']} rules of the verdict fire.\n"
        )
    for line in fuzz:
        limits, refusals = (
            ", ".join(f"{name} {count}" for name, count in line.get(kind, {}).items())
            for kind in ("limits", "refusals")
        )
        limited = f" Refused by a limit: {limits}." if limits else ""
        refused = f"{limited} Refused, where a step allows it: {refusals}." if refusals else limited
        yield (
            f"**Random programs: {line['programs']} run, {line['failures']} failed** ({line['kind']}, {line['profile']})."
            f"{refused}\n"
        )


def _environments(found: Results) -> str:
    lines = [
        "## Environment\n",
        "| date | target | packages | Python | machine | sources |",
        "|---|---|---|---|---|---|",
    ]
    used = {r.environment for r in found.by_case.values()}
    for environment in sorted(found.environments.values(), key=lambda e: (e.date, e.id)):
        if environment.id not in used:
            continue
        facts = environment.facts
        packages = ", ".join(f"{name} {facts[name]}" for name in expectations.PACKAGES if name in facts)
        machine = f"{facts['platform']} {facts['machine']}, {facts['cpu']}"
        cells = (environment.date[:10], facts["target"], packages, facts["python"], machine, f"`{facts['sources']}`")
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _table(ran: list[Result]) -> str:
    cells: dict[str, dict[str, list[Status]]] = defaultdict(lambda: defaultdict(list))
    for result in ran:
        case = Case.parse(result.case)
        cells[case.model][case.check].append(result.status)
    checks = sorted({check for row in cells.values() for check in row})
    lines = [_row(("model", *checks)), "|---|" + "--:|" * len(checks)]
    for model in sorted(cells):
        lines.append(_row((model, *(_cell(cells[model].get(check, [])) for check in checks))))
    total = (_cell([s for row in cells.values() for s in row.get(check, [])]) for check in checks)
    return "\n".join([*lines, _row(("all", *total))]) + "\n"


def _cell(statuses: list[Status]) -> str:
    passed = statuses.count(Status.PASS)
    if not statuses:
        return ""
    text = f"{passed}/{len(statuses)}"
    return text if passed == len(statuses) else f"**{text}**"


def _others(ran: list[Result], entries: list[expectations.Expectation], found: Results) -> str:
    groups: dict[tuple[Status, str, str], list[Case]] = defaultdict(list)
    for result in ran:
        if result.status != Status.PASS:
            environment = found.environments[result.environment]
            entry = expected(result.case, entries, environment.facts)
            as_expected = (
                judge(result, entries, environment.facts) is None
                and str(entry and entry.until) >= environment.date[:10]
            )
            known = f"{entry.reason} (until {entry.until})" if entry and as_expected else ""
            groups[result.status, _cut(result.reason), known].append(Case.parse(result.case))
    if not groups:
        return "Nothing.\n"
    lines = [_row(("status", "cases", "which", "found", "expected, since")), "|---|--:|---|---|---|"]
    for (status, reason, known), cases in sorted(groups.items(), key=lambda g: (g[0][0], g[1][0].model, g[0][1:])):
        which = "<br>".join(f"`{name}`" for name in compact(cases))
        lines.append(_row((status, str(len(cases)), which, reason, known or "**not expected**")))
    return "\n".join(lines) + "\n"


def _partly(ran: list[Result]) -> str:
    """The passes of checks that could hold only a part of what they are about against the whole, and why."""
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for result in ran:
        for name in PARTS.keys() & result.facts.keys() if result.status == Status.PASS else ():
            groups[name, _cut(str(result.facts[name]))].append(Case.parse(result.case))
    if not groups:
        return "None.\n"
    lines = [_row(("left out", "cases", "which", "since")), "|---|--:|---|---|"]
    for (name, reason), cases in sorted(groups.items(), key=lambda g: (g[0][0], g[1][0].model, g[0][1])):
        lines.append(_row((PARTS[name], str(len(cases)), "<br>".join(f"`{c}`" for c in compact(cases)), reason)))
    return "\n".join(lines) + "\n"


def _cut(reason: str) -> str:
    words = " ".join(reason.split())
    words = words if len(words) <= LONGEST else words[: LONGEST - 1].rstrip() + "…"
    return re.sub(r"([\[\]<>])", r"\\\1", words)  # else `['a']['b']` is a link


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
