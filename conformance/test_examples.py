"""The examples, run as scripts: they say what they show, and fail where the split differs from the model."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ariadne import SplitRuntime

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def example(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A finished run of the script in a process of its own, as a user starts it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


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


def test_every_example_is_run_by_a_test_here() -> None:
    text = Path(__file__).read_text()
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_")}
    assert scripts
    assert scripts <= set(re.findall(r'(?<!_)example\(\s*"(\w+)"', text))


def test_the_inference_demo_replays_every_cut() -> None:
    done = example("split_inference_demo")
    assert done.returncode == 0, done.stderr
    assert "batch 64: " in done.stdout
    assert "def suffix(B, relu_1, layer2):" in done.stdout
    assert "auto takes cut:9" in done.stdout


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
def test_the_functional_test_passes_on_a_real_model_under_its_short_name() -> None:
    done = example("real_model_functional_test", "--models", "mobilenet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchvision/mobilenet_v3_large: cut:" in done.stdout
    assert "replayed at batch 1, 2, 3, trained at 2, 3: equal in every bit" in done.stdout


@pytest.mark.zoo
@pytest.mark.slow
def test_the_percent_test_prints_a_row_for_each_cut() -> None:
    done = example("percent_split_real_model_test", "--models", "mobilenet", "nn/mlp10x64", "--percents", "25", "75")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines()[2:]]
    names = ["torchvision/mobilenet_v3_large", "nn/mlp10x64"]
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


@pytest.mark.parametrize("name", ["demo", "real_model_functional_test", "percent_split_real_model_test"])
def test_an_unknown_model_is_refused_with_the_nearest_names(
    main: Callable[..., Any], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(name, ["--models", "resnet19"])
    assert "no model named 'resnet19' in the zoo. Nearest: 'torchvision/resnet18'" in capsys.readouterr().err
