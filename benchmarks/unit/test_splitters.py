"""The table of who can split what: how answers are counted, and that the published one is what its data say."""

from __future__ import annotations

from typing import Any

from benchmarks.runner import ROOT
from benchmarks.splitters import read, table

PUBLISHED = ROOT / "reports" / "published-splitters" / "2026-11-25-cpu-torch2.15.0"


def test_answers_are_counted_as_yes_as_another_answer_or_as_none_and_others_are_listed() -> None:
    answers: list[dict[str, Any]] = [
        {"model": "a", "system": "ariadne", "parts": True, "output": True, "gradients": True, "smaller last": True},
        {
            "model": "a",
            "system": "pipelining",
            "parts": True,
            "output": True,
            "gradients": False,
            "differs": [2, "w", "b"],
        },
        {"model": "a", "system": "split_module", "error": "TraceError: no"},
    ]
    counted, listed = table(answers).split("\n\n")
    assert counted.splitlines()[2:] == [
        "| Ariadne | 1 yes | 1 yes | 1 yes | 1 yes |",
        "| torch `pipeline(…)` | 1 yes | 1 yes | 1 differs | 1 no |",
        "| FX `split_module` | 1 no | 1 no | 1 no | 1 no |",
    ]
    assert listed.splitlines()[2:] == ["| torch `pipeline(…)` | a | gradients; 2 gradients: w, b |"]


def test_the_published_table_is_what_its_answers_say() -> None:
    found = table(read(PUBLISHED / "answers.jsonl"))
    assert found in (PUBLISHED / "summary.md").read_text(encoding="utf-8")
    assert found.split("\n\n")[0] in (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
