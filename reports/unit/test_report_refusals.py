"""Raw data that can not be meant are refused with file and line; so is a report where something would be lost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from conformance.suite.statuses import Status
from reports import runs
from reports.__main__ import main
from reports.build import build
from reports.document import Report
from reports.unit import report_kit as kit
from reports.unit.report_kit import CASE, rounds, write_cases

# --- what can't be meant


def damaged(folder: Path, name: str, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        ("benchmarks.jsonl", ["{\n"], r"benchmarks\.jsonl:1: expected samples of the benchmarks, .* found '\{'"),
        (
            "conformance.jsonl",
            [""],
            r"conformance\.jsonl:1: expected results of the conformance suite, found an empty file",
        ),
        ("conformance.jsonl", ['{"ca'], r"conformance\.jsonl:1: expected .*, found an unfinished line"),
        ("conformance.jsonl", ['{"case": "a"}\n'], r"conformance\.jsonl:1: not a record"),
        (
            "benchmarks-2.jsonl",
            ["[1]\n"],
            r"benchmarks-2\.jsonl:1: expected .*, a JSON object to a line; found '\[1\]'",
        ),
        (
            "results.jsonl",
            ["{}\n"],
            r"results\.jsonl: expected one of conformance\*\.jsonl, .*found a file of another name",
        ),
        (
            "selftest.jsonl",
            ['{"mutants": 3}\n'],
            r"selftest\.jsonl:1: expected 'killed' to be int, found no such field",
        ),
        ("fuzz.jsonl", ['{"kind": 3}\n'], r"fuzz\.jsonl:1: expected 'kind' to be str, found 3"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_file_and_line(
    tmp_path: Path, name: str, lines: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        runs.read([damaged(tmp_path / "run", name, *lines)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job": "other"}, r":2: expected a job of rounds, reference, start, cuts, parts, found 'other'"),
        ({"seconds": []}, r":2: expected 'seconds' to be times above zero, found \[\]"),
        ({"seconds": [0.1, -1]}, r":2: expected 'seconds' to be times above zero, found \[0\.1, -1\]"),
        ({"seconds": [0.1, float("inf")]}, r":2: expected 'seconds' to be times above zero, found \[0\.1, inf\]"),
        (
            {"seconds": {"model": [0.1, 0.2], "compiled": [0.1]}},
            r":2: expected 'seconds' to hold as many times for each",
        ),
        ({"seconds": 0.1}, r":2: expected 'seconds' to be times above zero, found 0\.1"),
        ({"strayed": None, "graphs": None}, None),
        ({"status": "failed"}, r":2: expected a reason beside status 'failed', found none"),
        ({"status": "splendid"}, r":2: no record of a benchmark"),
    ],
)
def test_a_sample_that_lacks_what_its_job_measures_is_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    (sample,) = rounds("inference", "nn/mlp10x64", 1, {}, processes=1)[:1]
    if words is None:
        sample, words = (
            {k: v for k, v in sample.items() if k not in change},
            r":2: expected 'strayed', 'graphs' in a sample",
        )
    else:
        sample |= change
    here = kit.environment()
    lines = [here.record(), {"environment": here.id, **kit.MOMENT, **sample}]
    with pytest.raises(ValueError, match=words):
        runs.read([damaged(tmp_path / "run", "benchmarks.jsonl", *(json.dumps(line) + "\n" for line in lines))])


@pytest.mark.parametrize(
    ("name", "value"),
    [("prepare_seconds", math.nan), ("prepare_seconds", [0.1]), ("calls_seconds", 0.1), ("seconds", None)],
)
def test_a_start_whose_times_can_not_be_meant_is_refused(tmp_path: Path, name: str, value: object) -> None:
    sample = kit.starts("nn/mlp10x64", {}, processes=1)[0] | {name: value}
    here = kit.environment()
    lines = [here.record(), {"environment": here.id, **kit.MOMENT, **sample}]
    with pytest.raises(ValueError, match=f":2: expected '{name}' to be times above zero"):
        runs.read([damaged(tmp_path / "run", "benchmarks.jsonl", *(json.dumps(line) + "\n" for line in lines))])


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    run = kit.write_counts(tmp_path / "run")
    with open(run / "fuzz.jsonl", "ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(ValueError, match=r"fuzz\.jsonl:2: expected .* as UTF-8, found the byte 0xff"):
        runs.read([run])


def test_an_unfinished_last_line_is_passed_over_and_said_to_be(tmp_path: Path) -> None:
    run = write_cases(tmp_path / "run", {CASE: (Status.PASS, "")})
    with open(run / "conformance.jsonl", "a") as file:
        file.write('{"case": "for')
    build([run], None, tmp_path / "out")
    assert "its last line is unfinished and was passed over" in (tmp_path / "out" / "summary.md").read_text()


def test_a_report_within_its_run_is_the_same_when_it_is_made_again(tmp_path: Path) -> None:
    run = kit.write_counts(tmp_path / "run")
    found = []
    for _ in range(2):
        build([run], None, run / "report")
        found.append((run / "report" / "index.html").read_bytes())
    assert found[0] == found[1]


def test_the_command_says_what_is_wrong_and_returns_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 2
    assert "expected a folder with raw results, found nothing there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_says_where_the_report_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--baseline", str(run), "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert f"the report is at {(tmp_path / 'out' / 'index.html').resolve()}" in out
    assert "Against the earlier run: 14 pairs" in out


def test_a_data_folder_that_is_no_reports_is_not_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("precious")
    with pytest.raises(ValueError, match="holds no report to replace; give another --output"):
        build([run], None, tmp_path)
    assert (tmp_path / "data" / "mine").read_text() == "precious"


def test_a_run_that_lies_in_what_would_be_replaced_is_refused(report: tuple[Report, Path]) -> None:
    with pytest.raises(ValueError, match="which this report would replace; give another --output"):
        build([report[1] / "data" / "1"], None, report[1])
    assert (report[1] / "data" / "1" / "conformance.jsonl").exists()
