"""What runs in a measuring process: rounds, competitors and jobs; and what its records are taken for."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import model_zoo
from ariadne.compiled import CompileReport, SegmentReport
from benchmarks import child, competitors, environment, jobs, overhead, records, splits, stopped, timing
from benchmarks.findings import APART, Start, speeds, starts, versus
from benchmarks.subject import Subject, strayed
from benchmarks.variants import EAGER, NOISE, find
from reports.unit import report_kit as kit

MODEL = "nn/mlp10x64"


# --- rounds and competitors -------------------------------------------------------------------------------------------


def test_a_round_runs_each_once_in_an_order_of_its_own() -> None:
    ran: list[str] = []
    runs = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    times = timing.rounds(runs, 40, random.Random(0))
    assert {name: len(t) for name, t in times.items()} == {"a": 40, "b": 40, "c": 40}
    orders = ["".join(ran[i : i + 3]) for i in range(0, 120, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) == 6
    assert gc.isenabled()


INF, NAN = float("inf"), float("nan")


def test_differences_are_measured_against_the_largest_value() -> None:
    a = {"x": torch.tensor([1.0, 4.0]), "n": torch.tensor([1])}
    assert strayed(a, {"x": torch.tensor([1.0, 4.0]), "n": torch.tensor([1])}) == 0
    assert strayed(a, {"x": torch.tensor([1.0, 5.0]), "n": torch.tensor([1])}) == 0.25
    assert strayed(a, {"x": torch.tensor([1.0]), "n": torch.tensor([1])}) == float("inf")
    assert strayed(a, {"x": torch.tensor([1.0, 4.0]), "n": torch.tensor([2])}) == float("inf")
    assert strayed(a, {"x": torch.tensor([1.0, 4.0]).double(), "n": torch.tensor([1])}) == float("inf")
    assert strayed(torch.tensor([1 + 1j]), torch.tensor([1 + 1.5j])) == 0.5


@pytest.mark.parametrize(
    ("expected", "found", "apart"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], 0.0),
        ([1.0, NAN, 4.0], [1.0, NAN, 5.0], 0.25),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, INF], [1.0, -INF], INF),
        ([INF, 2.0], [INF, 3.0], 0.5),
    ],
)
def test_what_is_not_finite_is_equal_only_to_the_same(expected: list[float], found: list[float], apart: float) -> None:
    assert strayed(torch.tensor(expected), torch.tensor(found)) == apart


@pytest.mark.parametrize("name", ["export", "split_module", "pipelining", "debug", "generated"])
@pytest.mark.parametrize("task", ["inference", "training"])
def test_every_competitor_computes_what_the_model_does(name: str, task: str) -> None:
    variant = find(name)
    if variant.refusal(task, "cpu"):
        pytest.skip(f"{name} is not for {task}")
    subject = Subject(model_zoo.entry("torchvision/mobilenet_v3_small" if name == "export" else MODEL), "cpu", task)
    function = getattr({"competitors": competitors, "splits": splits}[variant.builder.split(".")[1].split(":")[0]],
                       variant.builder.split(":")[1])  # fmt: skip
    args, kwargs = subject.inputs(3)
    with torch.set_grad_enabled(task == "training"):
        whole, step = competitors.eager(subject, 3), function(subject, 3, **variant.options)
        for _ in range(2):  # in training, the second loss depends on the first step
            assert strayed(whole(args, kwargs), step(args, kwargs)) < 1e-5


def test_a_model_of_one_call_is_not_split() -> None:
    with pytest.raises(competitors.NotApplicableError, match="fewer than two calls"):
        competitors._half(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())).graph)


# --- jobs -------------------------------------------------------------------------------------------------------------

PROCESS: dict[str, Any] = {"imports": {}, "rss_bytes": {"python": 1, "imported": 2}}


def job(kind: str, *variants: str, process: int = 0) -> dict[str, Any]:
    found = {"job": kind, "task": "inference", "device": "cpu", "model": MODEL, "batches": [1], "process": process}
    return found | {"variant": variants[0], "variants": [*variants], "cache": "none", "pairs": 3, "settle": 2}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants in the order in which they are built; every one is the model itself, save "debug", which goes astray."""
    names: list[str] = []

    def build(name: str, subject: Subject, batch: int) -> Any:
        names.append(name)
        step, calls = competitors.eager(subject, batch), [0]

        def astray(args: Any, kwargs: Any) -> Any:
            calls[0] += 1
            return step(args, kwargs) + (1.0 if name == "debug" and calls[0] > 4 else 0.0)

        return astray

    monkeypatch.setattr(jobs, "_build", build)
    monkeypatch.setattr(jobs, "peak_bytes", lambda run: 0)
    return names


def test_a_start_has_the_model_twice_in_its_rounds_built_in_turns(built: list[str]) -> None:
    for process in (0, 1):
        (record,) = jobs.start(job("start", "generated", process=process), PROCESS)
        assert record["status"] == "ok", record
        assert {name: len(times) for name, times in record["seconds"].items()} == {"generated": 3, EAGER: 3, NOISE: 3}
    assert built == ["generated", EAGER, NOISE, "generated", NOISE, EAGER]


def test_rounds_are_built_in_an_order_of_the_process_and_compared_with_the_model_in_any(built: list[str]) -> None:
    names, orders = [EAGER, NOISE, "generated", "torch.compile"], set()
    for process in range(4):
        built.clear()
        found = list(jobs.side_by_side(job("rounds", *names, process=process), PROCESS))
        assert [(r["variant"], r["status"], r["strayed"]) for r in found] == [(name, "ok", 0.0) for name in names]
        orders.add(tuple(built))
    assert len(orders) > 2
    assert len({order[0] for order in orders}) > 1
    assert len({order[-1] for order in orders}) > 1


def test_outputs_are_compared_after_the_rounds_too(built: list[str]) -> None:
    found = {r["variant"]: r["strayed"] for r in jobs.side_by_side(job("rounds", EAGER, NOISE, "debug"), PROCESS)}
    assert found[NOISE] == 0
    assert found["debug"] > 0.1


def test_a_process_writes_its_token_into_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.JOBS, "rounds", lambda job, process: iter([{"batch": 1}, {"batch": 4}]))
    for _ in range(2):
        child.main({"job": "rounds", "imports": []}, str(tmp_path / "r.jsonl"))
    found = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [r["batch"] for r in found] == [1, 4, 1, 4]
    assert found[0]["token"] == found[1]["token"] != found[2]["token"] == found[3]["token"]


def test_packages_that_were_compiled_count_as_graphs_and_those_loaded_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before, segments = jobs._graphs(), [SegmentReport("prefix", "cut:1"), SegmentReport("suffix", "cut:1", loaded=1)]
    segments[0].compiled[False], segments[0].ways[False] = 2, "ahead of time"
    runtime = SimpleNamespace(report=lambda: CompileReport("compiled", "aot_inductor", tuple(segments)))
    monkeypatch.setattr(splits, "_ahead", [runtime])
    assert jobs._graphs() == before + 2


def test_the_environment_has_the_variables_that_processes_get() -> None:
    given = {
        "OMP_NUM_THREADS": "3", "ATEN_CPU_CAPABILITY": "avx2", "GOMP_CPU_AFFINITY": "0-1", "MALLOC_ARENA_MAX": "1",
        "TORCHINDUCTOR_FREEZING": "1", "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_WAIT_POLICY": "active",
    }  # fmt: skip
    others = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/of/one/process", "HOME": "/root"}
    facts = environment.here("cpu", {}, given | others).facts
    assert given.items() <= facts.items()
    assert not others.keys() & facts.keys()


# --- which records belong together ------------------------------------------------------------------------------------


def taken(tmp_path: Path, *samples: Mapping[str, Any]) -> records.Records:
    return records.read(kit.write_samples(tmp_path, [*map(dict, samples)]) / "benchmarks.jsonl")


def test_only_samples_of_one_process_are_paired(tmp_path: Path) -> None:
    samples = kit.rounds("inference", MODEL, 1, {"generated": 0.8, "compiled": 0.5})
    marked = [s | {"token": f"{s['process']}"} for s in samples]
    again = [s | {"token": "later"} for s in samples if s["variant"] in (EAGER, NOISE) or s["variant"] == "compiled"]
    for old in (samples, marked):
        found = {s.variant: s for s in speeds(taken(tmp_path / str("token" in old[0]), *old))}
        assert found["generated"].ratios.keys() == set(range(5))
    mixed = taken(tmp_path / "mixed", *marked, *again)
    found = {s.variant: s for s in speeds(mixed)}
    assert (found["generated"].failure, found["compiled"].failure) == (APART, None)
    (mean,) = versus(mixed, "compiled", "generated")
    assert mean.geomean.failures == {MODEL: "compiled: not measured in the same process as generated"}


def test_of_two_samples_with_one_key_the_newer_counts_in_any_order(tmp_path: Path) -> None:
    (sample,) = kit.rounds("inference", MODEL, 1, {}, processes=1)[:1]
    old, new = (sample | {"date": f"2026-11-{day}T10:00:00+00:00", "seconds": [float(day)]} for day in (19, 21))
    files = [kit.write_samples(tmp_path / n, [s]) / "benchmarks.jsonl" for n, s in (("old", old), ("new", new))]
    for paths in (files, files[::-1]):
        (found,) = records.read(*paths).samples.values()
        assert found["seconds"] == [21.0]


def paid(tmp_path: Path, saving: float, own: float | None, rounds: float | None = None) -> Start:
    """A start that saves a share of each call; how far the copy strays in one process, its own and of the rounds."""
    samples = kit.starts(MODEL, {("compiled", "cold"): (10.0, saving)})
    for s in samples:
        if own is None:
            s["seconds"].pop(NOISE, None)
        elif s["process"] == 0 and s["variant"] != EAGER:
            s["seconds"][NOISE] = [t * (1 + own) for t in s["seconds"][EAGER]]
    if rounds is not None:
        samples += kit.rounds("inference", MODEL, 1, {}, noise=rounds)
    return next(s for s in starts(taken(tmp_path, *samples)) if s.variant == "compiled")


@pytest.mark.parametrize(
    ("saving", "own", "rounds", "words"),
    [
        (0.08, 0.0, None, "between"),
        (0.08, 0.2, None, "not shown (the saving is within the noise floor of 2"),
        (-0.08, 0.2, None, "not shown (the saving is within the noise floor of 2"),
        (-0.08, 0.0, None, "never"),
        (0.015, 0.0, None, "not shown (the saving is within 2%)"),
        (0.08, 0.0, 0.3, "between"),  # the start's own pair goes before that of the rounds
        (0.08, None, 0.001, "between"),  # as older runs have it
        (0.08, None, 0.3, "not shown (the saving is within the noise floor of "),
        (0.08, None, None, "not shown (no eager-against-eager pair to hold the saving against)"),
    ],
)
def test_break_even_is_shown_beyond_the_noise_of_the_same_processes(
    tmp_path: Path, saving: float, own: float | None, rounds: float | None, words: str
) -> None:
    found = paid(tmp_path, saving, own, rounds)
    assert found.calls is not None
    assert found.seconds is not None
    assert found.calls.words().startswith(words)
    assert found.seconds.verdict == found.calls.verdict


def test_the_table_of_frontiers_is_made_as_plans_are_captured_now() -> None:
    assert overhead._frontier_row(20)[:2] == ["20", "19"]


@pytest.mark.parametrize(("fallback", "trains"), [("python", False), ("python-suffix", True)])
def test_a_suffix_in_python_is_timed_beside_the_models_own_part(fallback: stopped.Fallback, trains: bool) -> None:
    name = "MLP, 10 layers of 64"
    found = overhead._stopped_row((name, fallback, trains), 3, 0.0)
    assert found[:3] == [name, stopped.BEFORE[fallback], "training" if trains else "inference"]
    own, suffix, ratio = map(float, found[3:6])
    assert 0 < own < suffix
    assert ratio > 1


def test_a_process_is_timed_to_its_first_result_and_one_that_fails_tells_why() -> None:
    wait = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"  # Python would not end
    start = time.perf_counter()
    overhead.first_result(wait, {**os.environ})
    assert time.perf_counter() - start < 30
    with pytest.raises(RuntimeError, match="No module named 'nothing_of_that_name'"):
        overhead.first_result("import nothing_of_that_name", {**os.environ})
