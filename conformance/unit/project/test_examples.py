"""The examples, run as scripts: they say what they show, and fail where the split differs from the model."""

from __future__ import annotations

import importlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from ariadne import SplitRuntime

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def example(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A finished run of the script, as `python examples/NAME.py` runs it, but in this process, which has torch already."""
    script, code = str(EXAMPLES / f"{name}.py"), 0
    before = sys.argv, sys.path[:]
    sys.argv, sys.path = [script, *options], [str(EXAMPLES), *sys.path]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.argv, sys.path = before
    return subprocess.CompletedProcess([script, *options], code, out.getvalue(), err.getvalue())


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the main function of an example here, where something can be broken first."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name, *options: importlib.import_module(name).main(*options)


def off_in_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    run_suffix = SplitRuntime.run_suffix
    above = torch.tensor(9e9)
    monkeypatch.setattr(SplitRuntime, "run_suffix", lambda self, b: torch.nextafter(run_suffix(self, b), above))


def off_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    backward_prefix = SplitRuntime.backward_prefix

    def off(self: SplitRuntime, boundary: Any, boundary_grads: Any, **options: Any) -> None:
        backward_prefix(self, boundary, {k: g * 1.000001 for k, g in boundary_grads.items()}, **options)

    monkeypatch.setattr(SplitRuntime, "backward_prefix", off)


def test_every_example_is_run_by_a_test_here_or_by_torchrun() -> None:
    text = Path(__file__).read_text()
    by_torchrun = (Path(__file__).parents[1] / "pipeline/test_torchrun.py").read_text()
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_")}
    assert scripts
    run = set(re.findall(r'(?<!_)example\(\s*"(\w+)"', text)) | set(re.findall(r"examples/(\w+)\.py", by_torchrun))
    assert scripts <= run


def test_the_inference_demo_replays_every_cut_and_needs_nothing_but_the_script() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "split_inference_demo.py")]
    alone = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    done = example("split_inference_demo")
    assert (alone.returncode, done.returncode) == (0, 0), alone.stderr
    assert done.stdout == alone.stdout
    assert "batch 64: " in done.stdout
    assert "def suffix(B, relu_1, layer2):" in done.stdout
    assert "auto takes cut:9" in done.stdout


def test_an_edge_on_onnx_runtime_and_a_server_on_ariadne_give_what_the_model_gives() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    done = example("edge_on_onnx_runtime")
    assert done.returncode == 0, done.stderr
    assert "batch 7: 114688 bytes cross" in done.stdout
    assert done.stdout.endswith("give what the model gives\n")


def test_the_training_demo_ends_where_the_whole_model_does() -> None:
    done = example("split_training_demo")
    assert done.returncode == 0, done.stderr
    assert "after 5 steps all 11 parameters and buffers are equal in every bit" in done.stdout


@pytest.mark.parametrize(
    ("breaks", "name"), [(off_in_replay, "split_inference_demo"), (off_in_training, "split_training_demo")]
)
def test_a_toy_demo_fails_where_the_split_is_off_by_a_bit(
    main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, breaks: Callable[..., None], name: str
) -> None:
    main(name)
    breaks(monkeypatch)
    with pytest.raises(AssertionError):
        main(name)


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.variants
def test_the_functional_test_passes_on_a_real_model_under_its_short_name() -> None:
    done = example("real_model_functional_test", "--models", "mobilenet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchvision/mobilenet_v3_large: cut:" in done.stdout
    assert "replayed at batch 1, 2, 3, trained at 2, 3: equal in every bit" in done.stdout


def test_the_percent_test_prints_a_row_for_each_cut() -> None:
    done = example(
        "percent_split_real_model_test", "--models", "nn/lstm_classifier", "nn/mlp10x64", "--percents", "25", "75"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines()[2:]]
    names = ["nn/lstm_classifier", "nn/mlp10x64"]
    assert rows == [[name, f"percent:{p}"] for name in names for p in (25, 75)]


@pytest.mark.zoo
@pytest.mark.slow
def test_the_demo_prints_its_table_and_tells_how_far_it_is() -> None:
    done = example("demo", "--models", "resnet18", "--seconds", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (re.split(r" {2,}", line) for line in done.stdout.splitlines() if line.startswith("ResNet-18"))
    assert row[:5] == ["ResNet-18", "cut:34 after layer2", "34 + 35", "32,768", "0, 0"]
    assert 0 < float(row[5]) < 10
    assert "Every split equals the whole model in every bit." in done.stdout
    steps = done.stderr.splitlines()
    assert [line.split("]")[1].split()[0] for line in steps[:5]] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    assert "\r" not in done.stderr  # no terminal is there to rewrite


@pytest.mark.parametrize("model", ["nn/lstm_classifier", "nn/transformer_encoder"])
def test_the_demo_passes_on_models_that_draw_random_numbers_or_have_a_side_without_parameters(
    main: Callable[..., Any], model: str
) -> None:
    assert main("demo", ["--models", model, "--seconds", "0.01"]) == 0


@pytest.mark.parametrize(
    ("breaks", "words"), [(off_in_replay, r"replay at batch \d: "), (off_in_training, r"step 0 at batch \d: ")]
)
@pytest.mark.parametrize("name", ["demo", "real_model_functional_test", "percent_split_real_model_test"])
def test_a_real_model_example_fails_where_the_split_is_off_by_a_bit(
    main: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    breaks: Callable[..., None],
    words: str,
) -> None:
    breaks(monkeypatch)
    assert main(name, ["--models", "nn/mlp10x64", *(["--seconds", "0.01"] if name == "demo" else [])]) == 1
    assert re.search(words + r".*values differ", capsys.readouterr().out)


TIMING = ("real_model_timing", "replay_optimization_timing", "compile_overhead_timing")


@pytest.mark.compiler
@pytest.mark.slow
def test_the_timing_of_real_models_prints_a_row_for_each_part() -> None:
    done = example(
        "real_model_timing", "--models", "nn/mlp10x64", "--batches", "1", "2", "--iterations", "3", "--warmup", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, _, *rows = done.stdout.splitlines()
    assert re.fullmatch(r"torch \S+, CPU, 1 thread\(s\), 3 calls after 1, one process", first)
    found = [re.split(r" {2,}", row) for row in rows]
    inference, training = ["prefix_suffix", "suffix_replay"], ["suffix_training", "prefix_backward"]
    parts = [row[2] if row[2] == "direct_forward" else row[3] for row in found]
    assert parts == ["direct_forward", *inference, "direct_forward", *inference, *training]
    assert found[1][:5] == ["nn/mlp10x64", "1", "cut:10", "prefix_suffix", "generated_eager"]
    assert all(float(row[-1]) > 0 for row in found)


@pytest.mark.compiler
@pytest.mark.slow
def test_the_timing_of_replay_takes_the_options_of_its_page() -> None:
    options = ["--batches", "2", "3", "--iterations", "4", "--warmup", "2", "--backend", "torch_compile"]
    done = example("replay_optimization_timing", "--models", "nn/mlp10x64", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [re.split(r" {2,}", row)[1:4] for row in done.stdout.splitlines()[3:]]
    modes = ("generated_eager", "compiled, torch_compile")
    split = [[what, mode] for mode in modes for what in ("prefix_suffix", "suffix_replay")]
    assert rows == [[batch, *row] for batch in "23" for row in [["direct_forward", "eager"], *split]]


@pytest.mark.compiler
@pytest.mark.slow
def test_the_compile_overhead_is_paid_back_after_some_iterations_or_none() -> None:
    done = example("compile_overhead_timing", "--models", "nn/mlp10x64", "--iterations", "5", "--warmup", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (re.split(r" {2,}", line) for line in done.stdout.splitlines()[3:])
    assert row[:3] == ["nn/mlp10x64", "replay", "4"]
    prepare, first, cost, eager, compiled = map(float, row[3:8])
    assert cost == pytest.approx(
        prepare + first, rel=0.5
    )  # the calls after the first cost little more than steady ones
    if compiled < eager:
        assert re.fullmatch(r"about [\d,]+", row[8])


def test_the_compile_overhead_of_replay_and_retain_and_of_one_batch_after_another(
    main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(importlib.import_module("_timing").BACKENDS, "torch_compile", {"backend": "eager"})
    options = ["--modes", "replay", "retain", "--batches", "4", "5", "--iterations", "2", "--warmup", "1"]
    assert main("compile_overhead_timing", ["--models", "nn/mlp10x64", "--device", "cpu", *options]) == 0
    rows = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[1:3] for row in rows] == [[mode, batch] for mode in ("replay", "retain") for batch in "45"]
    assert [float(row[3]) > 0 for row in rows] == [True, False] * 2  # the first batch bears the preparation
    assert [row[-1] for row in rows[1::2]] == ["see batch 4, which bore the cost"] * 2


@pytest.mark.parametrize(
    ("first", "compiled", "words"),
    [([11.0, 1.0], [0.5, 0.5], ["13.00", "26"]), ([11.0], [1.5], ["11.50", "none: no call was saved time"])],
)
def test_break_even_is_the_cost_over_the_saving(
    monkeypatch: pytest.MonkeyPatch, first: list[float], compiled: list[float], words: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    row = importlib.import_module("compile_overhead_timing").figures(2.0, first, compiled, [1.0])
    assert [row[2], row[5].removeprefix("about ")] == words


@pytest.mark.parametrize("name", TIMING)
def test_cuda_is_required_or_refused(
    main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(name, ["--models", "nn/mlp10x64", "--require-cuda"])
    assert "CUDA was asked for, and torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo", "real_model_functional_test", "percent_split_real_model_test", *TIMING])
def test_an_unknown_model_is_refused_with_the_nearest_names(
    main: Callable[..., Any], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(name, ["--models", "resnet19"])
    assert "no model named 'resnet19' in the zoo. Nearest: 'torchvision/resnet18'" in capsys.readouterr().err


def test_the_drawing_demo_writes_both_views(tmp_path: Path) -> None:
    done = example("visualize_trace_demo", "--model", "resnet18", "--fileformat", "dot", "--outdir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split_graph.dot", "trace_graph.dot"]
    assert done.stdout.splitlines()[1:] == [str(tmp_path / "trace_graph.dot"), str(tmp_path / "split_graph.dot")]
    assert "layer1" in (tmp_path / "trace_graph.dot").read_text()
    assert example("visualize_trace_demo", "--model", "resnet99").returncode == 2
