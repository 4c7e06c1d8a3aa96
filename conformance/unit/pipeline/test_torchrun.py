"""The page about pipelines and the example, as a user starts them: by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def torchrun(*command: str, count: int = 2) -> str:
    """What a script under torchrun prints; it must end well within minutes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *command]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_page_leads_from_a_model_to_torchrun(tmp_path: Path) -> None:
    page = (ROOT / "docs/pipelines.md").read_text().partition("Put these blocks in a file")[0]
    script = tmp_path / "train.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    said = torchrun(str(script))
    losses = re.findall(r"rank (\d), step (\d): loss ([\d.]+)", said)
    assert len(losses) == 6
    of = {rank: [(step, loss) for r, step, loss in losses if r == rank] for rank in "01"}
    assert of["0"] == of["1"]


@pytest.mark.variants
@pytest.mark.parametrize("schedule", ["1f1b", "DualPipeV"])
def test_the_example_trains_as_the_whole_model(schedule: str) -> None:
    said = torchrun(str(ROOT / "examples/pipeline_training.py"), "--schedule", schedule, "--steps", "2")
    assert "gradients equal to the whole model's: True" in said
    assert "step 1: loss" in said
