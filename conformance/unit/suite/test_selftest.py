"""The selftest tested: it can fail, and its mutants are what they say. `python -m conformance.selftest` runs them all."""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest

import ariadne
from conformance import checks, mutants, selftest
from conformance.mutants import MUTANTS
from conformance.selftest import Outcome, Trial
from conformance.suite import matrix, selftest_rules
from conformance.suite.bench import Bench, load
from conformance.suite.cases import Case
from conformance.suite.statuses import Finding, Status

NAME = "train/nn/mlp10x64/cut=q50,bs=3,mode=train,backend=generated,steps=3"
KILLED = Outcome("one", "It breaks.", "runtime", (Trial(NAME, Status.FAIL_STATE, Status.FAIL_STATE, ""),))
ALIVE = replace(KILLED, trials=(Trial(NAME, Status.FAIL_STATE, Status.PASS, ""),))
UNSOUND = Trial(NAME, Status.PASS, Status.CRASH, "")


def said(outcomes: list[Outcome], unsound: list[Trial], rules: dict[str, str | None], *, whole: bool = False) -> int:
    return selftest.said(outcomes, unsound, rules, 1.0, None, whole=whole)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_of_a_mutant_are_cases_of_the_suite(name: str) -> None:
    mutant = MUTANTS[name]
    cases = [Case.parse(case) for case in mutant.noticed]
    assert cases, "no case is to notice it"
    for case in cases:
        assert case in matrix.cases(case.model)
    assert all(notice.status not in (Status.PASS, notice.without) for notice in mutant.noticed.values())


def modules_of_ariadne() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(ariadne.__path__, "ariadne.")]
    return [name for name in found if not name.endswith("__main__")]


def test_every_mutant_says_what_it_breaks_and_where() -> None:
    pieces = {name.removeprefix("ariadne.") for name in modules_of_ariadne()}
    assert len(MUTANTS) >= 36
    assert len({mutant.breaks for mutant in MUTANTS.values()}) == len(MUTANTS)
    for mutant in MUTANTS.values():
        assert mutant.breaks.endswith(".")
        assert mutant.piece in pieces


def test_a_mutant_is_a_target_by_its_name() -> None:
    assert load("conformance.mutants:swapped_frontier") == MUTANTS["swapped_frontier"].kind.prepare
    with pytest.raises(AttributeError, match="there is no mutant 'swapped_sides'; there are baked_batch, "):
        mutants.swapped_sides  # noqa: B018


def test_a_mutant_leaves_ariadne_whole() -> None:
    def held(module: ModuleType) -> dict[str, int]:
        found = {name: id(thing) for name, thing in vars(module).items()}
        for cls in (c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__):
            found |= {f"{cls.__qualname__}.{name}": id(thing) for name, thing in vars(cls).items()}
        return found

    modules = [importlib.import_module(name) for name in modules_of_ariadne()]
    before = [held(module) for module in modules]
    for name in ("baked_batch", "lost_op", "blind_to_flags", "unconsumed_boundary", "scaled_loss", "left_hook"):
        bench = Bench("nn/mlp10x64", MUTANTS[name].target)
        checks.run(Case.parse(NAME), bench)
    assert [held(module) for module in modules] == before


def test_a_killed_mutant_ends_well_and_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "selftest.jsonl"
    assert selftest.main(["detached_cut", "sorted_keys", "--results", str(file)]) == 0
    assert "2 of 2 killed" in capsys.readouterr().out
    (line,) = file.read_text().splitlines()
    data = json.loads(line)
    assert (data["mutants"], data["killed"], data["rules"]) == (2, 2, {"fire": 15, "of": 15})
    assert data["checks"] == {name: {"train": 1, "forward": 1}.get(name, 0) for name in checks.CHECKS}
    assert [o["mutant"] for o in data["outcomes"]] == ["detached_cut", "sorted_keys"]
    assert data["outcomes"][1]["trials"][0]["found"] == "fail_structure"


def test_a_check_that_compares_nothing_lets_mutants_live(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asleep = replace(checks.CHECKS["train"], run=lambda bench, case: Finding(Status.PASS))
    monkeypatch.setattr(checks, "CHECKS", MappingProxyType({**checks.CHECKS, "train": asleep}))
    assert selftest.main(["scaled_loss"]) == 1
    said = capsys.readouterr().out
    assert "SURVIVES" in said
    assert "it must come to fail_state; it came to pass" in said
    assert "0 of 1 killed" in said


def test_an_exact_status_is_asked_for() -> None:
    assert not replace(KILLED, trials=(replace(KILLED.trials[0], found=Status.FAIL_ACCURACY),)).killed
    assert not replace(KILLED, trials=()).killed
    assert not replace(KILLED, trials=(*KILLED.trials, *ALIVE.trials)).killed


def test_whatever_is_wrong_makes_it_fail() -> None:
    assert said([KILLED], [], {"rule": None}) == 0
    assert said([KILLED, ALIVE], [], {"rule": None}) == 1
    assert said([KILLED], [UNSOUND], {"rule": None}) == 1
    assert said([KILLED], [], {"rule": "it is silent"}) == 1


def test_a_check_that_kills_nothing_makes_it_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert said([KILLED], [], {}, whole=True) == 1
    assert "the check 'forward' kills no mutant" in capsys.readouterr().out


def test_a_case_that_fails_without_a_bug_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(checks.CHECKS["train"], run=lambda bench, case: Finding(Status.FAIL_STATE))
    monkeypatch.setattr(checks, "CHECKS", MappingProxyType({"train": broken}))
    assert [(trial.case, trial.found) for trial in selftest.sound(["scaled_loss"])] == [(NAME, Status.FAIL_STATE)] * 2


@pytest.mark.parametrize("name", selftest_rules.RULES)
def test_a_rule_of_the_verdict_fires(name: str) -> None:
    assert selftest_rules.RULES[name]() is None


NOT_OF_VERDICTS = ("two_environments", "now_this_now_that", "two_codes", "resume")


def test_a_verdict_that_finds_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_rules, "verdict", lambda *given: [])
    silent = [name for name, rule in selftest_rules.RULES.items() if rule() is not None]
    assert silent == [name for name in selftest_rules.RULES if name not in NOT_OF_VERDICTS]


def test_a_resume_that_skips_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipping(path: Path, environment: object, *, resumed: bool) -> set[str]:
        if not resumed:
            selftest_rules.results.append(path, environment)
        return set(selftest_rules.KNOWN) if resumed else set()

    monkeypatch.setattr(selftest_rules, "started", skipping)
    assert "it skips" in (selftest_rules.resume() or "")
