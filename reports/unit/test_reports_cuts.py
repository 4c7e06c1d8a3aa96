"""The profile along the cut: what it measures is what a report reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cut_profile
from reports import boundary, runs
from reports.build import build


def test_every_cut_has_its_bytes_and_some_are_timed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["nn/mlp10x64", "--output", str(run / "cuts.jsonl"), "--cuts", "3", "--pairs", "4", "--settle", "1"]
    assert cut_profile.main(arguments) == 0
    found = boundary.cuts(runs.read([run]).records)
    assert [c.cut for c in found] == list(range(1, len(found) + 1))
    assert all(c.boundary_bytes == 256 for c in found)  # 64 floats of a layer
    assert all(c.prefix_ops + c.suffix_ops == len(found) + 1 for c in found)
    timed = [c for c in found if c.prefix is not None]
    assert 3 <= len(timed) <= 4
    assert {1, len(found)} <= {c.cut for c in timed}
    assert [c.auto for c in found].count(True) == 1
    assert all(0 < c.share < 1 for c in timed if c.share is not None)
    assert timed[0].share < timed[-1].share  # type: ignore[operator]
    build([run], None, tmp_path / "out")
    assert "nn/mlp10x64: time, batch 1" in (tmp_path / "out" / "index.html").read_text()


def test_a_model_that_cannot_be_split_is_a_result_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cut_profile.main(["toys/tensor_hook", "--output", str(run / "cuts.jsonl")]) == 1
    assert "toys/tensor_hook: UnsupportedError" in capsys.readouterr().out
    build([run], None, tmp_path / "out")
    assert "toys/tensor_hook, cpu: failed: UnsupportedError" in (tmp_path / "out" / "index.html").read_text()


def test_timed_cuts_are_evenly_placed_from_first_to_last() -> None:
    cuts: list[Any] = [SimpleNamespace(cut=i) for i in range(1, 101)]
    assert [c.cut for c in cut_profile.evenly(cuts, 4)] == [1, 34, 67, 100]
    assert len(cut_profile.evenly(cuts[:3], 12)) == 3
    assert [c.cut for c in cut_profile.evenly(cuts, 1)] == [1]
