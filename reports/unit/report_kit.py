"""Runs made by hand for the tests of reports: folders of raw results whose verdicts are known beforehand."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.variants import BY_NAME, EAGER, NOISE
from conformance.suite import results
from conformance.suite.environment import Environment
from conformance.suite.results import Result
from conformance.suite.statuses import Status
from reports.document import Report, Table

CASE = "forward/toys/residual/cut=q50,bs=3,mode=eval,backend=generated"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACTS = {
    "target": "benchmarks",
    "device": "cpu",
    "torch": "2.15.0",
    "python": "3.12.1",
    "cpu": "a processor",
    "cores": "2",
    "platform": "linux",
    "machine": "x86_64",
    "sources": "aaaaaaaaaaaa",
    "option threads": "1",
    "option pairs": "9",
    "option settle": "3",
}
MOMENT = {"date": "2026-11-20T10:00:00+00:00", "load": [0.5, 0.5, 0.5], "commit": COMMIT}


def environment(**facts: str) -> Environment:
    """An environment of the benchmarks; facts replace those of `FACTS`."""
    return Environment("2026-11-20T09:00:00+00:00", FACTS | {k.replace("_", " "): v for k, v in facts.items()})


def write_cases(folder: Path, cases: Mapping[str, tuple[Status, str]], name: str = "conformance.jsonl") -> Path:
    """Results of the suite: a status and a reason for each case."""
    folder.mkdir(parents=True, exist_ok=True)
    here = Environment("2026-11-20T08:00:00Z", {k: v for k, v in FACTS.items() if " " not in k} | {"target": "ariadne"})
    results.append(folder / name, here)
    for case, (status, reason) in cases.items():
        results.append(folder / name, Result(case, status, reason, {}, 1.5, here.id))
    return folder


def write_suite(folder: Path, cases: list[str], expected: str, says: str = "") -> Path:
    """The suite as it was: these cases, of which one is expected to be refused, with these words."""
    entries = folder / "suite" / "expectations"
    entries.mkdir(parents=True)
    (folder / "suite" / "cases.lock").write_text("".join(f"{case}\n" for case in cases))
    entry = f'[[expect]]\nquery = "{expected}"\nstatus = "unsupported"\nreason = "it branches"\nuntil = 2027-01-01\n'
    entry += f'says = "{says}"\n' if says else ""
    (entries / "toys.toml").write_text(entry)
    return folder


def rounds(
    task: str, model: str, batch: int, ratios: Mapping[str, float | str], *, noise: float = 0.01, processes: int = 5,
    pace: float = 0.01, pairs: int = 9, device: str = "cpu",
) -> list[dict[str, Any]]:  # fmt: skip
    """Samples of rounds: each variant takes `ratio` times the model, or failed with the words that stand in its place."""
    chance = random.Random(f"{task} {model} {batch}")
    found = []
    for process in range(processes):
        head = {"job": "rounds", "task": task, "device": device, "model": model, "batch": batch, "process": process}
        drift = 1 + chance.uniform(-noise, noise)
        model_times = [pace * drift * (1 + chance.uniform(-noise, noise)) for _ in range(pairs)]
        for variant, ratio in {EAGER: 1.0, NOISE: 1.0, **ratios}.items():
            if isinstance(ratio, str):
                status, _, reason = ratio.partition(": ")
                found.append({**head, "variant": variant, "status": status, "reason": reason})
                continue
            times = [t * ratio * (1 + (chance.uniform(-noise, noise) if variant != EAGER else 0)) for t in model_times]
            graphs = {"strayed": 0.0, "graphs": 0, "graphs_in_rounds": 0}
            found.append({**head, "variant": variant, "status": "ok", "seconds": times, **graphs})
    return found


def starts(
    model: str, costs: Mapping[tuple[str, str], tuple[float, float]], *, task: str = "inference", batch: int = 1,
    pace: float = 0.01, processes: int = 5, spread: float = 0.02,
) -> list[dict[str, Any]]:  # fmt: skip
    """Samples of starts: for each variant and cache its cost X in seconds, and what a call saves, as a share of the model's."""
    chance = random.Random(f"{task} {model} {batch} starts")
    found = []
    for process in range(processes):
        for (variant, cache), (cost, saving) in {(EAGER, "none"): (0.0, 0.0), **costs}.items():
            head = {"job": "start", "task": task, "device": "cpu", "model": model, "batch": batch, "process": process}
            mine = pace * (1 - saving)
            prepare = cost / 4 * (1 + chance.uniform(-spread, spread))
            seconds = {variant: [mine * (1 + chance.uniform(-spread, spread) / 10) for _ in range(9)]}
            for whole in (EAGER, NOISE):
                seconds[whole] = [pace * (1 + chance.uniform(-spread, spread) / 10) for _ in range(9)]
            sizes = {"python": 20_000_000, "imported": 300_000_000, "called": 400_000_000}
            found.append(
                {
                    **head, "variant": variant, "cache": cache, "status": "ok", "prepare_seconds": prepare or 1e-4,
                    "calls_seconds": [cost * 3 / 4 + mine, mine, mine], "graphs": [0, 0, 2, 2, 2], "graphs_in_rounds": 0,
                    "seconds": seconds, "imports": dict.fromkeys(BY_NAME[variant].imports, 2.0),
                    "rss_bytes": sizes, "tensor_peak_bytes": 5_000_000,
                }
            )  # fmt: skip
    return found


def cuts(model: str, count: int = 8, unsafe: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """A profile along the cut: every second cut timed, the third chosen by "auto"."""
    found = []
    for cut in range(1, count + 1):
        head = {"job": "cuts", "task": "inference", "device": "cpu", "model": model, "batch": 1, "process": 0}
        times = {
            "prefix": [1e-3 * cut] * 3,
            "suffix": [1e-3 * (count + 1 - cut)] * 3,
            "model": [1e-3 * (count + 1)] * 3,
        }
        why = (unsafe or {}).get(cut, "")
        found.append(
            {
                **head, "variant": f"cut:{cut}", "status": "ok", "seconds": times if cut % 2 and not why else None, "cut": cut,
                "after": f"layer{cut}", "boundary_bytes": 1000.0 * (1 + (cut * 7) % 5), "values": 1, "prefix_ops": cut,
                "suffix_ops": count + 1 - cut, "unsafe": why, "auto": cut == 3,
            }
        )  # fmt: skip
    return found


def write_samples(
    folder: Path, samples: list[dict[str, Any]], name: str = "benchmarks.jsonl", here: Environment | None = None
) -> Path:
    """Samples under one environment."""
    here = here or environment()
    records.append(folder / name, [here, *({"environment": here.id, **MOMENT, **s} for s in samples)])
    return folder


def write_counts(folder: Path, killed: int = 82, mutants: int = 82, failures: int = 0) -> Path:
    """A line of the selftest's, and one of the random programs'."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = [{"mutant": f"mutant_{i}", "killed": i < killed} for i in range(mutants)]
    line = {"mutants": mutants, "killed": killed, "rules": {"fire": 10, "of": 10}, "outcomes": outcomes}
    (folder / "selftest.jsonl").write_text(json.dumps(line) + "\n")
    fuzz = {"kind": "networks", "profile": "full", "programs": 200, "failures": failures}
    (folder / "fuzz.jsonl").write_text(json.dumps(fuzz) + "\n")
    return folder


def write_timings(folder: Path, *tests: str, **more: Any) -> Path:
    """What pytest-benchmark writes of these tests, with 3 ms each; `more` replaces parts of the file."""
    stats = {"median": 0.003, "iqr": 0.0002, "rounds": 30, "data": [0.003] * 30}
    here = environment()
    found = {
        "machine_info": {"environment": here.id, "facts": here.facts},
        "commit_info": {"id": COMMIT, "dirty": False},
        "datetime": here.date,
        "benchmarks": [
            {"fullname": f"benchmarks/{test}", "group": None, "extra_info": {"bytes": 5120}, "stats": stats}
            for test in tests
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest-benchmark.json").write_text(json.dumps(found | more))
    return folder


def card(report: Report, title: str) -> tuple[str, str, str]:
    """Value, detail and tone of the card whose title begins so."""
    (found,) = (c for c in report.cards if c.title.startswith(title))
    return found.value, found.detail, found.tone


def table(report: Report, section: str, title: str) -> list[dict[str, str]]:
    """The rows of a section's table, by the names of its columns."""
    (found,) = (s for s in report.sections if s.name == section)
    (held,) = (b for b in found.blocks if isinstance(b, Table) and b.title.startswith(title))
    return [dict(zip(held.head, (cell.text for cell in row), strict=True)) for row in held.rows]


def whole_run(folder: Path) -> Path:
    """A small run with something for every section: two models, three checks, two tasks, break-even in three verdicts."""
    name, other = "nn/mlp10x64", "toys/residual"
    case = "cut=q50,bs=3,mode=eval,backend=generated"
    branches = "debug/toys/branch_on_data/cut=q50,bs=3,mode=eval"
    cases = {
        f"forward/{name}/{case}": (Status.PASS, ""),
        f"forward/{name}/cut=q50,bs=1,mode=eval,backend=generated": (Status.PASS, ""),
        f"forward/{other}/{case}": (Status.FAIL_ACCURACY, "values differ in 3 of 12 elements"),
        f"twice/{other}/cut=q50,mode=eval": (Status.PASS, ""),
        branches: (Status.UNSUPPORTED, "WitnessError: it branches"),
        f"rows/{name}/bs=3": (Status.NOT_SELECTED, "the time was up"),
    }
    write_cases(folder, cases)
    write_suite(folder, [*cases, f"left/{name}/mode=eval"], branches)
    write_counts(folder)
    ratios = {"generated": 0.8, "compiled": 1.005, "torch.compile": 0.9, "ahead of time": 0.45, "debug": 1.5}
    samples = rounds("inference", name, 1, ratios)
    samples += rounds("inference", other, 1, {**ratios, "compiled": "failed: RuntimeError: no compiler"})
    samples += rounds(
        "training", name, 1, {"generated": 0.9, "ahead of time": "not applicable: ahead of time is not for training"}
    )
    write_timings(folder, "test_payload.py::test_to_bytes[1-nn/mlp10x64]", "test_prepare.py::test_prepare[nn/mlp10x64]")
    costs = {("compiled", "cold"): (10.0, 0.4), ("compiled", "warm"): (2.0, -0.3), ("generated", "none"): (1.0, 0.0)}
    samples += starts(name, costs)
    write_samples(folder, samples)
    return write_samples(folder, cuts(name, unsafe={6: "a view crosses, and its base is written later"}), "cuts.jsonl")
