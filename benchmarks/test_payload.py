"""A boundary to bytes and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import model_zoo
from ariadne import BoundaryPayload, prepare_split

MODELS = ("nn/mlp10x64", "torchvision/resnet18", "ultralytics/yolov8n")


@pytest.fixture(params=[1, 16])
def boundary(request: pytest.FixtureRequest, name: str, benchmark: Any) -> BoundaryPayload:
    benchmark.group = f"payload of {name}, batch {request.param}"
    entry = model_zoo.entry(name)
    runtime = prepare_split(entry.build().eval(), entry.inputs(2)[0], split="percent:50")
    made = runtime.run_prefix(*entry.inputs(request.param)[0])
    benchmark.extra_info["bytes"] = len(made.to_bytes())
    return made


@pytest.mark.parametrize("name", MODELS)
def test_to_bytes(benchmark: Any, boundary: BoundaryPayload) -> None:
    assert benchmark.pedantic(boundary.to_bytes, rounds=30, warmup_rounds=3) == boundary.to_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_from_bytes(benchmark: Any, boundary: BoundaryPayload) -> None:
    found = benchmark.pedantic(BoundaryPayload.from_bytes, args=(boundary.to_bytes(),), rounds=30, warmup_rounds=3)
    assert all(torch.equal(a, b) for a, b in zip(found.raw, boundary.raw, strict=True) if isinstance(a, torch.Tensor))
