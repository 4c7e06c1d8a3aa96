"""Split held against whole on a device: what `python -m benchmarks cuda` compares, on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reports import runs
from reports.build import build
from reports.unit.report_kit import card, table

LINE = {"model": "nn/mlp10x64", "device": "cuda", "task": "inference", "status": "ok", "compared": 12}


def written(folder: Path, *more: dict[str, Any]) -> Path:
    folder.mkdir()
    lines = [LINE, *({**LINE, **m} for m in more)]
    (folder / "equality.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_was_compared_on_a_device_is_on_the_page(tmp_path: Path) -> None:
    noisy = {"task": "training", "compared": 9, "spread": 0.5}
    report = build([written(tmp_path / "run", noisy)], None, tmp_path / "out")
    assert card(report, "Split against whole on CUDA")[::2] == ("2 of 2 hold", "good")
    assert "training of nn/mlp10x64 within its own noise" in report.answers[0].words
    rows = table(report, "equality", "Split against whole, on CUDA")
    assert [row["found"] for row in rows] == ["equal", "within its own noise"]
    assert "Split against whole, on CUDA" in (tmp_path / "out/summary.md").read_text()


def test_what_differed_there_is_bad(tmp_path: Path) -> None:
    wrong = {"task": "training", "status": "failed", "compared": 2, "differs": ["percent:50, steps 0: values differ"]}
    report = build([written(tmp_path / "run", wrong)], None, tmp_path / "out")
    assert card(report, "Split against whole on CUDA")[::2] == ("1 of 2 hold", "bad")
    assert report.answers[0].words.startswith("No on this device")
    assert "values differ" in str(table(report, "equality", "Split against whole, on CUDA"))


def test_the_last_line_of_a_task_stands_and_a_line_without_one_is_refused(tmp_path: Path) -> None:
    (one,) = runs.read([written(tmp_path / "run", {"compared": 13})]).compared
    assert one["compared"] == 13
    with pytest.raises(ValueError, match=r"equality.jsonl:2: expected 'task' to be str, found None"):
        runs.read([written(tmp_path / "bad", {"task": None})])


def test_a_run_that_the_clock_ended_says_so(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    line = {"step": "replay", "about": "replay", "ended": False, "failures": 0, "failed": True}
    (folder / "steps.jsonl").write_text(json.dumps(line) + "\n")
    report = build([folder], None, tmp_path / "out")
    assert card(report, "This run is not whole")[0] == "1 of 1 step did not end in the time there was"
