"""The expectations engine: every rule of it fires."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest

from conformance.suite import expectations
from conformance.suite.cases import Case
from conformance.suite.environment import Environment
from conformance.suite.expectations import Expectation, parse, terms, written
from conformance.suite.report import report
from conformance.suite.results import Result, Results
from conformance.suite.statuses import Status
from conformance.suite.update import shortest, update
from conformance.suite.verdict import Problem, judge, verdict

TODAY = datetime.date(2026, 11, 21)
HERE = Environment(
    "2026-11-21T00:00:00Z",
    {"torch": "2.12.1", "python": "3.11.7", "target": "ariadne", "platform": "linux", "simd": "avx2"},
)
A1, A2, B1 = "forward/nn/a/bs=1", "forward/nn/a/bs=2", "forward/nn/b/bs=1"
KNOWN = (A1, A2, B1)


def expect(query: str, status: str = "unsupported", until: datetime.date = TODAY, condition: str = "") -> Expectation:
    return Expectation(query, Status(status), condition, "its size depends on data", until, "some.toml entry 1")


def result(case: str, status: str = "pass") -> Result:
    return Result(case, Status(status), "" if status == "pass" else "words", {}, 0.1, HERE.id)


def problems(found: list[Result], *entries: Expectation, selected: tuple[str, ...] = KNOWN) -> list[Problem]:
    got = Results()
    for record in (HERE, *found):
        got.add(record)
    return verdict(selected, KNOWN, got, list(entries), HERE.facts, TODAY)


PASSES = [result(name) for name in KNOWN]


def test_a_run_of_passes_is_green() -> None:
    assert problems(PASSES) == []


def test_a_failure_that_nobody_expects_is_a_problem() -> None:
    (problem,) = problems([*PASSES[:2], result(B1, "fail_accuracy")])
    assert (problem.rule, problem.subject) == ("unexpected", B1)
    assert problem.text == "fail_accuracy: words"


def test_what_fails_must_say_how() -> None:
    found = [*PASSES[:2], result(B1, "fail_accuracy")]
    (problem,) = problems(found, expect("forward/nn/b/*", "fail_accuracy"))
    assert problem.rule == "says_nothing"
    assert problems(found, dataclasses.replace(expect("forward/nn/b/*", "fail_accuracy"), says="words")) == []


def test_the_exact_status_is_expected_and_no_other() -> None:
    entry = expect("forward/nn/b/*")
    assert problems([*PASSES[:2], result(B1, "unsupported")], entry) == []
    (problem,) = problems([*PASSES[:2], result(B1, "crash")], entry)
    assert problem.rule == "unexpected"
    assert "crash against some.toml entry 1" in problem.text


def test_an_unexpected_pass_fails_the_run() -> None:
    (problem,) = problems(PASSES, expect(B1))
    assert (problem.rule, problem.subject) == ("unexpected_pass", B1)


def test_an_entry_over_several_cases_must_be_true_of_each() -> None:
    found = [result(A1, "unsupported"), result(A2), result(B1)]
    (problem,) = problems(found, expect("forward/nn/a/*"))
    assert (problem.rule, problem.subject) == ("unexpected_pass", A2)


def test_an_entry_that_matches_nothing_fails_the_run() -> None:
    (problem,) = problems(PASSES, expect("forward/nn/c/*"))
    assert problem.rule == "matches_nothing"
    assert "forward/nn/c/* means no case" in problem.text


def test_each_query_of_a_brace_list_must_match_something() -> None:
    found = [*PASSES[:2], result(B1, "unsupported")]
    (problem,) = problems(found, expect("forward/nn/{b,c}/*"))
    assert problem.rule == "matches_nothing"
    assert problem.text.startswith("forward/nn/c/*")


def test_an_expired_entry_fails_the_run_and_its_last_day_is_good() -> None:
    found = [*PASSES[:2], result(B1, "unsupported")]
    assert problems(found, expect(B1, until=TODAY)) == []
    (problem,) = problems(found, expect(B1, until=TODAY - datetime.timedelta(days=1)))
    assert problem.rule == "expired"
    (problem,) = problems(PASSES, expect(B1, until=TODAY - datetime.timedelta(days=1), condition="torch<2.12"))
    assert problem.rule == "expired", "wherever it holds"


def test_overlapping_entries_fail_the_run() -> None:
    found = [*PASSES[:2], result(B1, "unsupported")]
    (problem,) = problems(found, expect("forward/nn/b/*"), expect(B1))
    assert problem.rule == "overlap"
    assert problems(found, expect("forward/nn/b/*"), expect(B1, condition="torch<2.12")) == []


def test_a_selected_case_without_a_result_fails_the_run() -> None:
    (problem,) = problems(PASSES[:2])
    assert (problem.rule, problem.subject) == ("no_result", B1)
    assert problems(PASSES[:2], selected=(A1, A2)) == []


def test_a_case_that_did_not_run_is_not_green_even_if_expected() -> None:
    found = [*PASSES[:2], result(B1, "not_selected")]
    (problem,) = problems(found)
    assert problem.rule == "not_selected"
    (problem,) = problems(found, expect(B1))
    assert problem.rule == "not_selected"


def test_a_result_is_judged_in_its_own_environment() -> None:
    entry = expect(B1, condition="torch<2.12")
    older = HERE.facts | {"torch": "2.11.0"}
    assert judge(result(B1, "unsupported"), [entry], older) is None
    assert judge(result(B1, "unsupported"), [entry], HERE.facts) is not None


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("", True),
        ("torch<2.13", True),
        ("torch<2.12", False),
        ("torch>=2.12, python>=3.11", True),
        ("torch>=2.12, python>=3.12", False),
        ("torch~=2.12.0", True),
        ("target=ariadne", True),
        ("target=identity", False),
        ("target!=identity, platform=linux", True),
        ("simd=avx2", True),
        ("simd!=avx2", False),
        ("timm>=1", False),  # not installed
    ],
)
def test_conditions(condition: str, holds: bool) -> None:
    assert expect(B1, condition=condition).holds(HERE.facts) is holds


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("torch", "not of the form"),
        ("torch<2.12 or torch>3", "not of the form"),
        ("weather=fine", "condition on 'weather'"),
        ("target<identity", "target is a word"),
        ("torch<two", "no version"),
        ("torch=2.11,", "not of the form"),
    ],
)
def test_conditions_without_meaning_are_refused(condition: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        terms(condition)


ENTRY = 'query = "forward/nn/b/*"\nstatus = "unsupported"\nreason = "why"\nuntil = 2027-01-01\n'


def test_a_file_is_read_with_its_common_condition() -> None:
    (entry,) = parse(f'condition = "target=ariadne"\n[[expect]]\n{ENTRY}condition = "torch<3"\n', "x.toml")
    assert (entry.status, entry.condition, entry.where) == ("unsupported", "target=ariadne, torch<3", "x.toml entry 1")
    assert entry.until == datetime.date(2027, 1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[expect]]\n" + ENTRY.replace("unsupported", "broken"), "x.toml entry 1: 'broken' is not a valid Status"),
        ("[[expect]]\n" + ENTRY.replace('"unsupported"', '"pass"'), "nothing needs to be expected to pass"),
        ("[[expect]]\n" + ENTRY.replace('"why"', '" "'), "a reason must be given"),
        ("[[expect]]\n" + ENTRY.replace("b/*", "*/b"), "not a case"),
        ("[[expect]]\n" + ENTRY.replace("2027-01-01", '"2027-01-01"'), "until is a date"),
        ("[[expect]]\n" + ENTRY.replace("reason", "because"), r"lacks \['reason'\], has unknown \['because'\]"),
        ("[expect\n", "x.toml: "),
        ("expects = []\n", "not \\['expects'\\]"),
    ],
)
def test_a_file_that_can_not_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text, "x.toml")


def test_entries_are_written_as_they_are_read() -> None:
    entries = [expect("forward/nn/b/*", condition="torch<3"), expect(A1)]
    odd = Expectation(A2, Status.CRASH, "", 'a "quoted" \\ reason\nin two lines', TODAY)
    many = Expectation((A1, B1), Status.OOM, "", "large", TODAY)
    back = parse(written([*entries, odd, many]), "x.toml")
    assert [(e.query, e.status, e.condition, e.reason, e.until) for e in back] == [
        (e.query, e.status, e.condition, e.reason, e.until) for e in [*entries, odd, many]
    ]


def test_updating_drops_what_is_untrue_and_adds_what_is_new(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(written([expect(A1)]))
    mine = tmp_path / "mine.toml"
    mine.write_text(written([expect(B1), expect("train/nn/z/*", "crash")]))
    found = Results()
    for record in (HERE, result(A1, "unsupported"), result(A2, "timeout"), result(B1)):
        found.add(record)
    update(mine, tmp_path, list(KNOWN), map(Case.parse, KNOWN), found, HERE)
    entries = expectations.load(tmp_path)
    assert [(*e.lines, str(e.status)) for e in entries] == [
        ("train/nn/z/*", "crash"),
        (A2, "timeout"),
        (A1, "unsupported"),
    ]
    assert entries[1].until == TODAY + datetime.timedelta(days=30)
    assert verdict(KNOWN, [*KNOWN, "train/nn/z/"], found, entries, HERE.facts, TODAY) == []


def test_new_entries_say_it_shortly() -> None:
    known = [Case.parse(f"{check}/nn/a/bs={bs}") for check in ("forward", "left", "train") for bs in (1, 2)]
    assert shortest(known, known) == ["{forward,left,train}/nn/a/*"]
    assert shortest(known[:3], known) == ["forward/nn/a/*", "left/nn/a/bs=1"]
    assert shortest(known[1:2], known) == ["forward/nn/a/bs=2"]
    unknown = Case.parse("source/nn/a/cut=rand:1")
    assert shortest([unknown], known) == ["source/nn/a/cut=rand:1"]


def test_an_entry_may_list_several_queries() -> None:
    entry = parse("[[expect]]\n" + ENTRY.replace('"forward/nn/b/*"', f'["{A1}", "forward/nn/b/*"]'), "x.toml")[0]
    assert entry.queries == (A1, "forward/nn/b/*")
    assert [entry.means(name) for name in KNOWN] == [True, False, True]


def test_the_report_groups_cases_and_says_how_to_repeat_one() -> None:
    found = problems([result(A1, "crash"), result(A2, "crash"), result(B1)], expect("forward/nn/c/*"))
    assert len(found) == 3
    assert report(found, {Status.CRASH: 2, Status.PASS: 1}, 1.2, "identity").splitlines() == [
        "matches_nothing: 1",
        "  some.toml entry 1 (forward/nn/c/* is unsupported): forward/nn/c/* means no case of the suite",
        "",
        "unexpected: 2",
        "  forward/nn/a/bs={1,2}",
        "    crash: words",
        "    > nox -s 'conformance(nn)' -- --case 'forward/nn/a/bs=1' --target identity",
        "    > python -m conformance --case 'forward/nn/a/bs=1' --target identity",
        "",
        "conformance: 1 pass, 2 crash; 3 problems; 1 s: not green",
    ]


def test_the_entries_of_this_repository_can_be_meant() -> None:
    for entry in expectations.load():
        assert entry.queries, entry
        assert all(Case.parse(q) if "*" not in q else q for q in entry.queries), entry
