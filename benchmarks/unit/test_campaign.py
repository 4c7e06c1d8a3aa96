"""The campaign on a device that is at hand for half an hour: the order of its parts, the clock, and how it goes on."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ariadne import SplitRuntime
from benchmarks import campaign, device, runner
from benchmarks.__main__ import main
from benchmarks.environment import FIXED
from benchmarks.equality import equality
from benchmarks.runner import Options, Runner, units

MODEL = "nn/mlp10x64"
ASKED = {"job": "equality", "device": "cpu", "model": MODEL, "imports": []}


def test_what_is_worth_most_comes_first() -> None:
    found = campaign.steps((MODEL,), "cuda", small=False)
    assert tuple(s.name for s in found) == campaign.STEPS
    compiling, replay, starts, training, batches = (s.options for s in found[1:] if s.options)
    assert (replay.batches, batches.batches, training.batches) == ((1,), (256,), (32,))
    assert (starts.start_processes, starts.processes, training.tasks) == (1, 0, ("training",))
    assert (compiling.variants, compiling.cache) == (replay.variants, replay.cache), "what it compiles is what they run"
    assert [s.file for s in found] == ["benchmarks.jsonl", "compiling.jsonl", *["benchmarks.jsonl"] * 4]


def test_the_models_at_peoples_sizes_are_replayed_and_started_alone() -> None:
    found = {s.name: s.options for s in campaign.steps(("sized/resnet50_224", MODEL), "cuda", small=False) if s.options}
    assert {name for name, o in found.items() if o.models == (MODEL,)} == {"training", "batches"}


def test_by_place_each_model_has_all_its_processes_before_the_next() -> None:
    options = Options((MODEL, "nn/lstm_classifier"), processes=3, start_processes=0)
    assert [(u.process, u.model) for u in units(options)][:2] == [(0, MODEL), (0, "nn/lstm_classifier")]
    by_place = [(u.model, u.process) for u in units(replace(options, by_place=True))]
    assert by_place == [(m, p) for m in (MODEL, "nn/lstm_classifier") for p in range(3)]


def test_no_unit_is_begun_without_time_and_none_that_the_clock_ended_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST", 0.5)
    options = Options((MODEL,), processes=1, start_processes=0, by_place=True)
    late = Runner(replace(options, until=time.monotonic() + 0.1), tmp_path / "a.jsonl", lambda _: None)
    assert late.run() == 0
    assert late.out_of_time
    ended = Runner(replace(options, until=time.monotonic() + 2), tmp_path / "b.jsonl", lambda _: None)
    ended._start = lambda *_: time.sleep(2.1) or ("timed out", "by the clock")  # type: ignore[method-assign]
    assert ended.run() == 0
    assert ended.out_of_time
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 1, "the environment alone"


def test_children_import_what_the_parent_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{runner.ROOT}:")
    path = Runner(Options((MODEL,)), tmp_path / "x.jsonl", lambda _: None)._environ(tmp_path, False)["PYTHONPATH"]
    assert path.split(":") == [str(runner.ROOT), str(tmp_path)]


def test_split_equals_whole_in_replay_and_in_training() -> None:
    inference, training = equality(ASKED, {})
    assert (inference["status"], inference["compared"], inference["deterministic"]) == ("ok", 12, False)
    assert (training["status"], training["compared"], training["deterministic"]) == ("ok", 9, False)


def test_a_split_that_is_off_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SplitRuntime.run_suffix
    monkeypatch.setattr(SplitRuntime, "run_suffix", lambda self, boundary: right(self, boundary) + 1e-6)
    inference, training = equality(ASKED, {})
    assert inference["status"] == "failed"
    assert "percent:25, batch 1" in inference["differs"][0]
    assert training["status"] == "ok"


def found(job: str, model: str, folder: Path, limit: float) -> list[dict[str, Any]]:
    return [
        {"model": model, "device": "cpu", "task": task, "status": "ok", "compared": 1}
        for task in ("inference", "training")
    ]


def test_what_the_folder_holds_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        Runner, "alone", lambda self, job, model, *rest: asked.append(model) or found(job, model, *rest)
    )
    monkeypatch.setattr(campaign, "steps", lambda *_: (campaign.Step("equality", "whether they are equal"),))
    said: list[str] = []
    for models in ((MODEL,), (MODEL, "nn/lstm_classifier"), (MODEL, "nn/lstm_classifier")):
        assert campaign.run(models, "cpu", 1.0, tmp_path, True, said.append) == 0
    assert asked == [MODEL, "nn/lstm_classifier"]
    notes = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [n["ended"] for n in notes] == [True] * 3
    assert campaign.run((MODEL, "nn/transformer_encoder"), "cpu", 0.0, tmp_path, True, said.append) == 0
    assert "no time is left" in said[-1]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        main(["cuda", "--output", str(tmp_path / "run")])
    assert "torch finds no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_settings_that_are_fixed_exist_and_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    device.fix("cpu")
    assert torch.backends.cudnn.benchmark
    device.fix("cuda")
    assert not torch.backends.cudnn.benchmark
    assert {*FIXED} >= {"cudnn.allow_tf32", "cuda.matmul.allow_tf32"}


def test_a_lost_device_is_told_apart_from_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device.hold_alive("cuda", ValueError("one variant's own")) if torch.cuda.is_available() else None
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    device.hold_alive("cuda", ValueError("one variant's own"))

    def gone(*_: Any) -> None:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    with pytest.raises(device.LostDeviceError, match="one variant's own"):
        device.hold_alive("cuda", ValueError("one variant's own"))
    device.hold_alive("cpu", ValueError("nothing to lose"))


def test_cuda_graphs_are_counted_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.cuda_graphs("cpu") is None
    manager = SimpleNamespace(roots={"a": [1, 2], "b": [3]})
    trees = SimpleNamespace(get_manager=lambda *_, **__: manager)
    monkeypatch.setitem(device.sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device.cuda_graphs("cuda:0")["recorded"] == 3  # type: ignore[index]
    assert math.isfinite(device.cuda_graphs("cuda:0")["left_out"])  # type: ignore[index]
