"""The page that is made from results: rendered from a small file, held against the text that it must be."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from conformance import results
from conformance.__main__ import main
from conformance.environment import Environment
from conformance.expectations import Expectation, written
from conformance.results import Result
from conformance.statuses import Status

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

**6 cases of 2 models: 3 pass, 1 crash, 2 unsupported.** They took 3 minutes of one core.

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
"""


def test_the_page_is_made_from_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "forward/nn/a/bs=1": (Status.PASS, ""),
        "forward/nn/a/bs=2": (Status.PASS, ""),
        "left/nn/a/mode=eval": (Status.PASS, ""),
        "forward/nn/b/bs=1": (Status.UNSUPPORTED, "no plan"),
        "forward/nn/b/bs=2": (Status.UNSUPPORTED, "no plan"),
        "left/nn/b/mode=eval": (Status.CRASH, "ValueError: a | b[0]\n  in two lines"),
    }
    records = [Result(name, status, why, {}, 30.0, HERE.id) for name, (status, why) in found.items()]
    entry = Expectation("forward/nn/b/*", Status.UNSUPPORTED, "", "sizes depend on data", datetime.date(2027, 1, 1))
    (tmp_path / "expectations").mkdir()
    (tmp_path / "expectations" / "a.toml").write_text(written([entry]))
    selftest, fuzz = tmp_path / "selftest.jsonl", tmp_path / "fuzz.jsonl"
    rules = {"rules": {"fire": 12, "of": 12}}
    selftest.write_text("".join(json.dumps({"killed": n, "mutants": 31} | rules) + "\n" for n in (30, 31)))
    fuzz.write_text(json.dumps({"kind": "networks", "profile": "full", "programs": 200, "failures": 0}) + "\n")
    for order in (records, records[::-1]):
        path = tmp_path / "r.jsonl"
        path.unlink(missing_ok=True)
        for record in (HERE, *order):
            results.append(path, record)
        given = [str(path), "--selftest", str(selftest), "--fuzz", str(fuzz)]
        assert main(["summary", *given, "--expectations-from", str(tmp_path / "expectations")]) == 0
        assert capsys.readouterr().out == PAGE
