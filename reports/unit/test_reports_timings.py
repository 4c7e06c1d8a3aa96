"""Timings of pytest-benchmark in a report: the real suites' file is read, and one that can't be meant is refused."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.suite.environment import ROOT
from reports import runs, timings
from reports.build import build
from reports.unit.report_kit import environment, table, write_timings

PAYLOAD = "test_payload.py::test_to_bytes[1-nn/mlp10x64]"


def test_what_the_suites_write_is_shown_and_names_no_machine(tmp_path: Path) -> None:
    file = tmp_path / "run" / "pytest-benchmark.json"
    file.parent.mkdir()
    command = [sys.executable, "-m", "pytest", f"benchmarks/{PAYLOAD}", "-q", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*command, "--benchmark-json", str(file)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    held = json.loads(file.read_text())
    assert set(held["machine_info"]) == {"environment", "facts"}
    assert platform.node() not in held["machine_info"]["facts"].values()
    (found,) = runs.read([file.parent]).timings
    assert found.environment.facts["torch"]
    (row,) = table(build([file.parent], None, tmp_path / "out"), "timings", "A boundary to bytes and back")
    assert row["what"] == "payload of nn/mlp10x64, batch 1: to bytes [1-nn/mlp10x64]"
    assert row["again"] == f"pytest 'benchmarks/{PAYLOAD}'"
    assert row["rounds"] == str(len(held["benchmarks"][0]["stats"]["data"])) == "30"
    assert row["noted"].startswith("bytes ")


def test_suites_stand_in_order_and_those_judged_elsewhere_are_folded(tmp_path: Path) -> None:
    tests = ["test_new.py::test_a", "test_inference.py::test_forward[x]", PAYLOAD, "test_prepare.py::test_prepare[x]"]
    found = timings.section([timings.read(write_timings(tmp_path, *tests) / "pytest-benchmark.json")])
    told = [(block.title, block.folded) for block in found.blocks if hasattr(block, "folded")]  # type: ignore[union-attr]
    assert told == [
        ("Preparing, cutting elsewhere, finding every cut", False),
        ("A boundary to bytes and back", False),
        ("A forward", True),
        ("test_new.py", False),
    ]


def test_two_files_are_told_apart_by_their_environments(tmp_path: Path) -> None:
    write_timings(tmp_path, PAYLOAD)
    other = environment(torch="2.14.0")
    (tmp_path / "pytest-benchmark.json").rename(tmp_path / "pytest-benchmark-1.json")
    write_timings(tmp_path, PAYLOAD, machine_info={"environment": other.id, "facts": other.facts})
    found = build([tmp_path], None, tmp_path / "out")
    for one in (environment(), other):
        assert table(found, "timings", f"A boundary to bytes and back, {one.id}")[0]["median"] == "3.00 ms"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"benchmarks": []}, "expected timings of at least one benchmark, found none"),
        ({"machine_info": {"node": "a"}}, r"`pytest benchmarks --benchmark-json` writes, .*KeyError\('environment'\)"),
        ({"machine_info": {"environment": "0", "facts": {}}}, "does not fit its facts"),
        (
            {"benchmarks": [{"fullname": "a", "group": None, "extra_info": {}, "stats": {"median": 0, "iqr": 0}}]},
            "no times",
        ),
    ],
)
def test_a_file_that_can_not_be_meant_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    run = write_timings(tmp_path, PAYLOAD, **more)
    with pytest.raises(ValueError, match=rf"pytest-benchmark\.json: .*{words}"):
        runs.read([run])


def test_what_an_interrupted_run_leaves_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest-benchmark.json").touch()
    with pytest.raises(ValueError, match=r"pytest-benchmark\.json: .*, found an empty file"):
        runs.read([tmp_path])
