"""A forward at steady state: the model, and the split in the modes that need no compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import model_zoo
from benchmarks.competitors import eager
from benchmarks.splits import split
from benchmarks.subject import Subject, strayed

MODELS = ("nn/mlp10x64", "torchvision/mobilenet_v3_small", "torchvision/resnet18", "transformers/bert_tiny")
WAYS = {"model": eager, "generated": split, "debug": partial(split, mode="debug_interpreter")}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_forward(benchmark: Any, name: str, way: str, batch: int) -> None:
    benchmark.group = f"forward {name}, batch {batch}"
    subject = Subject(model_zoo.entry(name), "cpu", "inference")
    args, kwargs = subject.inputs(batch)
    with torch.no_grad():
        expected = eager(subject, batch)(args, kwargs)
        found = benchmark.pedantic(WAYS[way](subject, batch), args=(args, kwargs), rounds=20, warmup_rounds=5)
    assert strayed(expected, found) == 0
