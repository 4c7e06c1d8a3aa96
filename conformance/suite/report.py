"""What a run says at its end: every reason why it is not green, and the lines that reproduce a case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conformance.suite.cases import Case
from conformance.suite.queries import compact
from conformance.suite.statuses import Status
from conformance.suite.verdict import Problem

MOST = 40  # of the reasons of one rule


def report(problems: list[Problem], statuses: Mapping[Status, int], seconds: float, target: str) -> str:
    """The report on a run, its cases counted by status: problems by rule, those of one model and reason together."""
    lines = [line for rule in sorted({p.rule for p in problems}) for line in _rule(rule, problems, target)]
    state = "not green" if problems else "green"
    counts = ", ".join(f"{statuses[status]} {status}" for status in Status if statuses.get(status))
    return "\n".join(
        [*lines, f"conformance: {counts or 'no cases'}; {len(problems)} problems; {seconds:.0f} s: {state}"]
    )


def _rule(rule: str, problems: list[Problem], target: str) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        if problem.rule == rule:
            model = Case.parse(problem.subject).model if problem.is_case else problem.subject
            groups.setdefault((model, problem.text), []).append(problem)
    yield f"{rule}: {sum(map(len, groups.values()))}"
    for (_, text), some in list(groups.items())[:MOST]:
        if not some[0].is_case:
            yield f"  {some[0].subject}: {text}"
            continue
        cases = [Case.parse(p.subject) for p in some]
        yield from (f"  {name}" for name in compact(cases))
        yield from (f"    {line}" for line in text.splitlines())
        if rule != "not_selected":
            yield from (f"    > {line}" for line in reproduce(cases[0], target))
    if len(groups) > MOST:
        yield f"  and {len(groups) - MOST} more such groups, in the results"
    yield ""


def reproduce(case: Case, target: str) -> tuple[str, str]:
    """The lines that run this case alone, in an environment made for it or in this one."""
    options = f"--case '{case}'" + ("" if target == "ariadne" else f" --target {target}")
    return f"nox -s 'conformance({case.family})' -- {options}", f"python -m conformance {options}"
