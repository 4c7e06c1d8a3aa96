"""The verdict on a run: green only if every selected case has a result, and every result is a pass or expected as it is."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from conformance.suite.cases import matches
from conformance.suite.expectations import Expectation
from conformance.suite.results import Result, Results
from conformance.suite.statuses import Status


@dataclass(frozen=True)
class Problem:
    """One reason why a run is not green: which rule was broken, by what, and how."""

    rule: str
    subject: str
    text: str

    @property
    def is_case(self) -> bool:
        """Whether the subject is a case, and not an entry of the expectations."""
        return self.rule in ("unexpected", "unexpected_pass", "not_selected", "no_result")

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}: {self.text}"


def judge(result: Result, expectations: Iterable[Expectation], facts: Mapping[str, str]) -> Problem | None:
    """What is wrong with one result; None for a pass, and for a status that an entry expects exactly.

    `facts` are those of the environment that the result was made in.
    """
    entry = expected(result.case, expectations, facts)
    if result.status == Status.NOT_SELECTED:
        return Problem("not_selected", result.case, result.reason)
    if entry is None:
        if result.status == Status.PASS:
            return None
        return Problem("unexpected", result.case, f"{result.status}: {result.reason}")
    if result.status == entry.status and entry.says in result.reason:
        return None
    if result.status == entry.status:
        return Problem(
            "unexpected", result.case, f"{result.status}, but not for the reason of {entry}: {result.reason}"
        )
    if result.status == Status.PASS:
        return Problem("unexpected_pass", result.case, f"it passes, against {entry}; take the case out of that entry")
    return Problem("unexpected", result.case, f"{result.status} against {entry}: {result.reason}")


def expected(case: str, expectations: Iterable[Expectation], facts: Mapping[str, str]) -> Expectation | None:
    """The first entry that is about this case and holds in this environment."""
    return next((e for e in expectations if e.means(case) and e.holds(facts)), None)


def verdict(
    selected: Iterable[str],
    known: Iterable[str],
    results: Results,
    expectations: list[Expectation],
    facts: Mapping[str, str],
    today: datetime.date,
) -> list[Problem]:
    """Everything that keeps a run from being green.

    `selected` are the cases that must have a result, `known` all cases of the suite; `facts` are those of the environment
    in which entries are held against each other. A result is judged in the environment that it names.
    """
    found = [*_stale(expectations, set(known), today), *_overlapping(expectations, sorted(set(known)), facts)]
    for case in selected:
        result = results.by_case.get(case)
        if result is None:
            found.append(Problem("no_result", case, "it was to run, and has no result"))
            continue
        problem = judge(result, expectations, results.environments[result.environment].facts)
        if problem:
            found.append(problem)
    return found


def _stale(expectations: list[Expectation], known: set[str], today: datetime.date) -> Iterator[Problem]:
    for entry in expectations:
        if entry.until < today:
            yield Problem("expired", str(entry), f"it held until {entry.until}: mend the cause or give it a new date")
        if entry.status.is_failure and not entry.says:
            text = f"{entry.status} must say how: `says` holds words of the result's own reason, else other failures hide behind it"
            yield Problem("says_nothing", str(entry), text)
        for query in entry.queries:
            if not any(matches(query, case) for case in known):
                yield Problem("matches_nothing", str(entry), f"{query} means no case of the suite")


def _overlapping(expectations: list[Expectation], known: list[str], facts: Mapping[str, str]) -> Iterator[Problem]:
    active = [entry for entry in expectations if entry.holds(facts)]
    for one, other in itertools.combinations(active, 2):
        if not any(a.rstrip("*").startswith(b.rstrip("*")) or b.rstrip("*").startswith(a.rstrip("*"))
                   for a in one.queries for b in other.queries):  # fmt: skip
            continue
        both = next((case for case in known if one.means(case) and other.means(case)), None)
        if both:
            yield Problem("overlap", str(one), f"{other} is about {both} too; a case has one expectation")
