"""A training step: the whole model's, the split's, and the halves of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import model_zoo
from ariadne import prepare_split
from benchmarks.competitors import eager
from benchmarks.splits import split
from benchmarks.subject import Subject

MODELS = ("nn/mlp10x64", "torchvision/mobilenet_v3_small", "torchvision/resnet18", "transformers/bert_tiny")
BATCH = 4


@pytest.mark.parametrize("way", [eager, split])
@pytest.mark.parametrize("name", MODELS)
def test_step(benchmark: Any, name: str, way: Any) -> None:
    benchmark.group = f"training step of {name}, batch {BATCH}"
    subject = Subject(model_zoo.entry(name), "cpu", "training")
    loss = benchmark.pedantic(way(subject, BATCH), args=subject.inputs(BATCH), rounds=10, warmup_rounds=3)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("part", ["run_training_prefix", "train_suffix", "backward_prefix"])
@pytest.mark.parametrize("name", MODELS)
def test_part(benchmark: Any, name: str, part: str) -> None:
    benchmark.group = f"parts of a training step of {name}, batch {BATCH}"
    entry = model_zoo.entry(name)
    (args, kwargs), (example, example_kwargs) = entry.inputs(BATCH), entry.inputs(2)
    runtime = prepare_split(entry.build().train(), example, example_kwargs=example_kwargs, split="percent:50")

    def loss_fn(output: Any, _: Any) -> torch.Tensor:
        return entry.loss(output)

    def before() -> tuple[tuple[Any, ...], dict[str, Any]]:
        runtime.model.zero_grad(set_to_none=True)
        if part == "run_training_prefix":
            return args, kwargs
        boundary = runtime.run_training_prefix(*args, **kwargs)
        if part == "train_suffix":
            return (boundary,), {"loss_fn": loss_fn}
        return (boundary, runtime.train_suffix(boundary, loss_fn=loss_fn)[1]), {}

    benchmark.pedantic(getattr(runtime, part), setup=before, rounds=10, warmup_rounds=3)
    moved = any(p.grad is not None for p in runtime.prefix_parameters())
    assert moved == (part == "backward_prefix")
