"""The rules of the verdict tested: each fires on a run that breaks it, and is silent on the same run mended.

A rule is shown by a function that returns None, or in words what went wrong.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from conformance.suite import results
from conformance.suite.environment import Environment
from conformance.suite.expectations import Expectation
from conformance.suite.results import Result, Results
from conformance.suite.run import started
from conformance.suite.statuses import Status
from conformance.suite.verdict import verdict

HERE = Environment(
    "2026-01-01T00:00:00Z", {"target": "ariadne", "torch": "2.15.0", "python": "3.12.0", "platform": "linux"}
)
ELSEWHERE = Environment(HERE.date, HERE.facts | {"torch": "2.11.0"})
TODAY = datetime.date(2026, 1, 2)
ONE, OTHER = (f"forward/nn/mlp10x64/cut=q50,bs={bs},mode=eval,backend=generated" for bs in (1, 2))
KNOWN = (ONE, OTHER)
REFUSED = Expectation(ONE, Status.UNSUPPORTED, "target=ariadne, torch>=2.12", "no plan holds it", TODAY)


def result(case: str, status: Status = Status.PASS, environment: Environment = HERE) -> Result:
    return Result(case, status, "" if status is Status.PASS else "as it is", {}, 0.1, environment.id)


def broken(found: list[Result], entries: list[Expectation], today: datetime.date = TODAY) -> list[str]:
    """The rules that a run of both cases with these results and expectations breaks."""
    collected = Results({HERE.id: HERE, ELSEWHERE.id: ELSEWHERE})
    for one in found:
        collected.add(one)
    return [problem.rule for problem in verdict(KNOWN, KNOWN, collected, entries, HERE.facts, today)]


def shows(rule: str, wrong: Callable[[], list[str]], mended: Callable[[], list[str]]) -> str | None:
    """None if `wrong` breaks just this rule and `mended` breaks none."""
    fired, silent = wrong(), mended()
    if fired != [rule]:
        return f"a run that breaks it is judged {fired or 'green'}"
    return f"a run that keeps it is judged {silent}" if silent else None


def unexpected() -> str | None:
    """A result that is no pass, and that no entry expects."""
    failed = [result(ONE, Status.FAIL_ACCURACY), result(OTHER)]
    return shows("unexpected", lambda: broken(failed, []), lambda: broken([result(ONE), result(OTHER)], []))


def other_status() -> str | None:
    """A result that an entry expects with another status."""
    return shows(
        "unexpected",
        lambda: broken([result(ONE, Status.CRASH), result(OTHER)], [REFUSED]),
        lambda: broken([result(ONE, Status.UNSUPPORTED), result(OTHER)], [REFUSED]),
    )


def other_environment() -> str | None:
    """An entry whose condition does not hold where the result was made expects nothing of it."""
    return shows(
        "unexpected",
        lambda: broken([result(ONE, Status.UNSUPPORTED, ELSEWHERE), result(OTHER)], [REFUSED]),
        lambda: broken([result(ONE, environment=ELSEWHERE), result(OTHER)], [REFUSED]),
    )


def unexpected_pass() -> str | None:
    """A pass where an entry expects something else."""
    return shows(
        "unexpected_pass",
        lambda: broken([result(ONE), result(OTHER)], [REFUSED]),
        lambda: broken([result(ONE), result(OTHER)], []),
    )


def matches_nothing() -> str | None:
    """An entry that means no case of the suite, or one query of whose brace list means none."""
    refused = [result(ONE, Status.UNSUPPORTED), result(OTHER)]
    gone = replace(REFUSED, query=f"{{{ONE.partition('/')[0]},trained}}/nn/mlp10x64/cut=q50,bs=1,*")
    return shows("matches_nothing", lambda: broken(refused, [gone]), lambda: broken(refused, [REFUSED]))


def expired() -> str | None:
    """An entry whose date has passed."""
    refused, tomorrow = [result(ONE, Status.UNSUPPORTED), result(OTHER)], TODAY + datetime.timedelta(days=1)
    return shows("expired", lambda: broken(refused, [REFUSED], tomorrow), lambda: broken(refused, [REFUSED]))


def overlap() -> str | None:
    """Two entries that hold and mean one case."""
    refused = [result(ONE, Status.UNSUPPORTED), result(OTHER)]
    wide = replace(REFUSED, query="forward/nn/mlp10x64/cut=q50,bs=1*", where="another file entry 1")
    older = replace(wide, condition="torch<2.12")
    return shows("overlap", lambda: broken(refused, [REFUSED, wide]), lambda: broken(refused, [REFUSED, older]))


def no_result() -> str | None:
    """A selected case that has no result."""
    return shows("no_result", lambda: broken([result(ONE)], []), lambda: broken([result(ONE), result(OTHER)], []))


def not_selected() -> str | None:
    """A case that the run had no time for, even where an entry expects what it would have come to."""
    late = [result(ONE, Status.NOT_SELECTED), result(OTHER)]
    return shows(
        "not_selected",
        lambda: broken(late, [REFUSED]),
        lambda: broken([*late, result(ONE, Status.UNSUPPORTED)], [REFUSED]),
    )


def another_reason() -> str | None:
    """A result with the status that an entry expects, but not for the reason that it names."""
    refused = [result(ONE, Status.UNSUPPORTED), result(OTHER)]
    return shows(
        "unexpected",
        lambda: broken(refused, [replace(REFUSED, says="another reason")]),
        lambda: broken(refused, [replace(REFUSED, says="as it is")]),
    )


def says_nothing() -> str | None:
    """An entry that expects a failure of whatever kind: another failure of the same cases would hide behind it."""
    failed = [result(ONE, Status.FAIL_ACCURACY), result(OTHER)]
    entry = replace(REFUSED, status=Status.FAIL_ACCURACY)
    return shows(
        "says_nothing", lambda: broken(failed, [entry]), lambda: broken(failed, [replace(entry, says="as it is")])
    )


def refused(hold: Callable[[], None], words: str) -> str | None:
    """None if `hold` refuses results for a reason with these words."""
    try:
        hold()
    except ValueError as error:
        return None if words in str(error) else f"refused with {error}"
    return "not refused"


def two_environments() -> str | None:
    """Results of one case from two environments are not taken for one, and one of them does not stand for the other."""
    both = Results({HERE.id: HERE, ELSEWHERE.id: ELSEWHERE})
    for one in (result(ONE), result(ONE, Status.CRASH, ELSEWHERE)):
        both.add(one)
    if both.of(HERE.id).by_case:
        return f"here it has {both.of(HERE.id).by_case}"
    return refused(both.hold_single, "two results")


def now_this_now_that() -> str | None:
    """A case that fails and then passes in one environment is not taken for one that passes, in whatever order they come."""
    for statuses in ((Status.FAIL_ACCURACY, Status.PASS), (Status.PASS, Status.FAIL_ACCURACY)):
        found = Results({HERE.id: HERE})
        for status in statuses:
            found.add(result(ONE, status))
        wrong = refused(found.hold_single, "two results")
        if wrong:
            return f"{statuses}: {wrong}"
    return None


def two_codes() -> str | None:
    """Results of different sources are not judged as one."""
    other = Environment(HERE.date, HERE.facts | {"sources": "of another day"})
    both = Results({HERE.id: HERE, other.id: other})
    for one in (result(ONE), result(OTHER, environment=other)):
        both.add(one)
    return refused(both.hold_of_one_code, "sources")


def resume() -> str | None:
    """A resumed run skips what ran in its environment, and nothing else; half a line, left by a kill, is no result."""
    with tempfile.TemporaryDirectory(prefix="ariadne-selftest-") as folder:
        path = Path(folder) / "results.jsonl"
        if started(path, HERE, resumed=False):
            return "a new file of results holds some"
        results.append(path, result(ONE, Status.FAIL_ACCURACY))
        results.append(path, result(OTHER, Status.NOT_SELECTED))
        with path.open("ab") as out:
            out.write(results.line(result(OTHER)).encode()[:-9])
        again, elsewhere = started(path, HERE, resumed=True), started(path, ELSEWHERE, resumed=True)
        if again != {ONE}:
            return f"it skips {sorted(again)}, where {ONE} alone has run"
        if elsewhere:
            return f"in another environment it skips {sorted(elsewhere)}"
        results.append(path, result(OTHER))
        found = results.read(path)
        if {name: r.status for name, r in found.by_case.items()} != {ONE: Status.FAIL_ACCURACY, OTHER: Status.PASS}:
            return f"the file then holds {found.by_case}"
    return None


RULES: Mapping[str, Callable[[], str | None]] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            unexpected,
            other_status,
            other_environment,
            unexpected_pass,
            matches_nothing,
            expired,
            overlap,
            no_result,
            not_selected,
            another_reason,
            says_nothing,
            two_environments,
            now_this_now_that,
            two_codes,
            resume,
        )
    }
)
