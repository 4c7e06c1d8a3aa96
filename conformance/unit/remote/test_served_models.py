"""Real models, served by a process that has the suffix's file alone: what comes back is what the whole model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ariadne
import model_zoo
from ariadne import tree
from conformance.unit.remote_kit import served

MODELS = (
    *("torchvision/resnet18", "transformers/bert_tiny", "transformers/gpt2_tiny"),
    *("ultralytics/yolov8n", "torchvision/swin_t", "rfdetr/nano"),
)


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS[:2], *(pytest.param(m, marks=pytest.mark.variants) for m in MODELS[2:])])
def test_a_process_with_the_file_alone_serves_it(tmp_path: Path, name: str) -> None:
    entry = model_zoo.entry(name)
    model = entry.build().eval()
    args, kwargs = entry.inputs(2)
    runtime = ariadne.prepare_split(model, args, split="50%", example_kwargs=kwargs)
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side, examples=[entry.inputs(n) for n in (1, 2, 3)])
    edge = ariadne.load(tmp_path / "prefix", plain=True)
    with served(tmp_path / "suffix") as process, ariadne.connect(process.address, edge, timeout=120) as remote:
        for batch in (1, 2, 3):
            args, kwargs = entry.inputs(batch, seed=batch)
            with torch.no_grad():
                expected = [*tree.leaves(model(*args, **kwargs))]
            found = [*tree.leaves(remote.run_suffix(edge.run_prefix(*args, **kwargs)))]
            assert len(found) == len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
