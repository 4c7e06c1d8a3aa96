"""The examples, run as scripts: they say what they show, and fail where the split differs from the model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
BROKEN = """
import runpy, sys, torch
from ariadne import SplitRuntime
{patch}
sys.argv = sys.argv[1:]
sys.path.insert(0, {examples!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OFF_IN_REPLAY = """
run_suffix = SplitRuntime.run_suffix
SplitRuntime.run_suffix = lambda self, boundary: torch.nextafter(run_suffix(self, boundary), torch.tensor(9e9))
"""
OFF_IN_TRAINING = """
backward_prefix = SplitRuntime.backward_prefix
def off(self, boundary, gradients, **options):
    return backward_prefix(self, boundary, {k: g * 1.0000002 for k, g in gradients.items()}, **options)
SplitRuntime.backward_prefix = off
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def example(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run(str(EXAMPLES / f"{name}.py"), *options)


def broken(patch: str, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The example, in a process where the runtime gives results that are off by the last bit."""
    return run("-c", BROKEN.format(patch=patch, examples=str(EXAMPLES)), str(EXAMPLES / f"{name}.py"), *options)


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
    ("patch", "name"), [(OFF_IN_REPLAY, "split_inference_demo"), (OFF_IN_TRAINING, "split_training_demo")]
)
def test_a_toy_demo_fails_where_the_split_is_off_by_a_bit(patch: str, name: str) -> None:
    done = broken(patch, name)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


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


def test_the_demo_trains_models_that_draw_random_numbers() -> None:
    done = example("demo", "--models", "nn/lstm_classifier", "--seconds", "0.01")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("patch", "words"), [(OFF_IN_REPLAY, "replay at batch 1: "), (OFF_IN_TRAINING, "step 0 at batch 2: ")]
)
@pytest.mark.parametrize("name", ["demo", "real_model_functional_test", "percent_split_real_model_test"])
def test_a_real_model_example_fails_where_the_split_is_off_by_a_bit(name: str, patch: str, words: str) -> None:
    options = ["--models", "nn/mlp10x64", *(["--seconds", "0.01"] if name == "demo" else [])]
    done = broken(patch, name, *options)
    assert done.returncode == 1, done.stderr
    expected = words if name != "percent_split_real_model_test" else re.sub(r"batch \d", "batch 3", words)
    assert expected in done.stdout
    assert "values differ" in done.stdout


@pytest.mark.parametrize("name", ["demo", "real_model_functional_test", "percent_split_real_model_test"])
def test_an_unknown_model_is_refused_with_the_nearest_names(name: str) -> None:
    done = example(name, "--models", "resnet19")
    assert done.returncode == 2
    assert "no model named 'resnet19' in the zoo. Nearest: 'torchvision/resnet18'" in done.stderr
