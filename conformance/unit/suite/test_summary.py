"""The page that is made from results: rendered from a small file, held against the text that it must be."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.suite import lock, results
from conformance.suite.cases import Case
from conformance.suite.environment import Environment
from conformance.suite.expectations import Expectation, written
from conformance.suite.results import Result
from conformance.suite.statuses import Status

HERE = Environment(
    "2026-11-21T10:00:00Z",
    {
        "cpu": "a CPU",
        "machine": "x86_64",
        "platform": "linux",
        "python": "3.11.7",
        "sources": "abc",
        "target": "ariadne",
        "torch": "2.15.0",
    },
)
PAGE = """\
# Conformance: results

<!-- made by `python -m conformance summary`; change the data, not this page -->

Whether a model that is split equals the model whole, case by case. A cell counts passes and cases; the list below
names every case that is no pass. What the checks, statuses and tiers are: [decision 6](decisions/0006-conformance.md).

**6 cases of 2 models: 3 pass, 1 crash, 2 unsupported.** These are all cases of the tier small.
They took 3 minutes of one core, without the building of models.

**Mutants killed: 31 of 31**, bugs planted in the runtime that the suite must notice; 12 of 12 rules of the verdict fire.

**Random programs: 200 run, 0 failed** (networks, full).

## Environment

| date | target | packages | Python | machine | sources |
|---|---|---|---|---|---|
| 2026-11-21 | ariadne | torch 2.15.0 | 3.11.7 | linux x86_64, a CPU | `abc` |

## Models × checks

| model | forward | left |
|---|--:|--:|
| nn/a | 2/2 | 1/1 |
| nn/b | **0/2** | **0/1** |
| all | **2/4** | **1/2** |

## What is not a pass

| status | cases | which | found | expected, since |
|---|--:|---|---|---|
| crash | 1 | `left/nn/b/mode=eval` | ValueError: a \\| b\\[0\\] in two lines | **not expected** |
| unsupported | 2 | `forward/nn/b/bs={1,2}` | no plan | sizes depend on data (until 2027-01-01) |

## Passes that left a part out

| left out | cases | which | since |
|---|--:|---|---|
| training | 1 | `left/nn/a/mode=eval` | error_eager: no second step |
"""
FOUND = {
    "forward/nn/a/bs=1": (Status.PASS, ""),
    "forward/nn/a/bs=2": (Status.PASS, ""),
    "left/nn/a/mode=eval": (Status.PASS, ""),
    "forward/nn/b/bs=1": (Status.UNSUPPORTED, "no plan"),
    "forward/nn/b/bs=2": (Status.UNSUPPORTED, "no plan"),
    "left/nn/b/mode=eval": (Status.CRASH, "ValueError: a | b[0]\n  in two lines"),
}
PARTS = {"left/nn/a/mode=eval": {"not_trained": "error_eager: no second step"}}
TIERS = """
[small]
minutes = 1
[[small.select]]
[limits]
build = { seconds = 30, gib = 4 }
cheap = { seconds = 30, gib = 4 }
medium = { seconds = 30, gib = 4 }
heavy = { seconds = 30, gib = 4 }
"""
SELFTEST = {"killed": 31, "mutants": 31, "of": 31, "unsound": [], "rules": {"fire": 12, "of": 12}, "sources": "abc"}
FUZZ = {"kind": "networks", "profile": "full", "programs": 200, "failures": 0, "sources": "abc"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some.lock").write_text(lock.text([Case.parse(name) for name in FOUND]))
    (tmp_path / "tiers.toml").write_text(TIERS)
    (tmp_path / "expectations").mkdir()
    entry = Expectation("forward/nn/b/*", Status.UNSUPPORTED, "", "sizes depend on data", datetime.date(2027, 1, 1))
    (tmp_path / "expectations" / "a.toml").write_text(written([entry]))
    for name, line in (("selftest", SELFTEST), ("fuzz", FUZZ)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    write(tmp_path, *records())
    return tmp_path


def records() -> list[Result]:
    return [Result(name, status, why, PARTS.get(name, {}), 30.0, HERE.id) for name, (status, why) in FOUND.items()]


def write(folder: Path, *found: Result, environment: Environment = HERE) -> None:
    path = folder / "r.jsonl"
    path.unlink(missing_ok=True)
    for record in (environment, *found):
        results.append(path, record)


def summary(folder: Path) -> int:
    files = {"expectations": "expectations", "lock": "some.lock", "tiers": "tiers.toml"}
    given = [text for name, file in files.items() for text in (f"--{name}-from", str(folder / file))]
    given += [text for name in ("selftest", "fuzz") for text in (f"--{name}", str(folder / f"{name}.jsonl"))]
    return main(["summary", str(folder / "r.jsonl"), "--tier", "small", *given])


def test_the_page_is_made_from_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for order in (records(), records()[::-1]):
        write(folder, *order)
        assert summary(folder) == 0
        assert capsys.readouterr().out == PAGE


def test_what_came_to_its_status_for_another_reason_is_not_shown_as_expected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "expectations" / "a.toml"
    for old, new in (("status =", 'says = "no room"\nstatus ='), ("2027-01-01", "2026-01-01")):
        before = file.read_text()
        file.write_text(before.replace(old, new))
        assert summary(folder) == 0
        assert "| no plan | **not expected** |" in capsys.readouterr().out
        file.write_text(before)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("selftest", {"mutants": 1, "killed": 1}, "a selftest of 1 of 31 mutants"),
        ("selftest", {"unsound": [{}]}, "with 1 cases that are not sound"),
        ("selftest", {"sources": "other"}, "ran on the code other, the cases on abc"),
        ("fuzz", {"sources": None}, "ran on the code None, the cases on abc"),
    ],
)
def test_a_figure_that_says_nothing_of_these_results_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], file: str, change: dict[str, object], words: str
) -> None:
    path = folder / f"{file}.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | change) + "\n")
    assert summary(folder) == 2
    assert words in capsys.readouterr().err


def test_a_part_of_a_tier_is_not_shown_as_the_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, *records()[1:])
    assert summary(folder) == 2
    assert "tier small: 1 have no result, forward/nn/a/bs=1 for one" in capsys.readouterr().err
    write(folder, *records(), Result("forward/nn/gone/bs=1", Status.PASS, "", {}, 1.0, HERE.id))
    assert summary(folder) == 2
    assert "tier small: 1 are none of its cases, forward/nn/gone/bs=1 for one" in capsys.readouterr().err
