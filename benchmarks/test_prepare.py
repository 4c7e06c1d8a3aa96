"""How long it takes to prepare a split, to cut it elsewhere, and to find every cut.

    pytest benchmarks --benchmark-json=FILE

These suites time one process, for a look while working; `python -m benchmarks run` starts several and draws conclusions.
"""

from __future__ import annotations

from typing import Any

import pytest

import model_zoo
from ariadne import prepare_split
from ariadne.cut import frontiers

MODELS = ("nn/mlp10x64", "torchvision/mobilenet_v3_small", "torchvision/resnet18", "transformers/bert_tiny")


def prepared(name: str, **options: Any) -> Any:
    entry = model_zoo.entry(name)
    args, kwargs = entry.inputs(2)
    return prepare_split(entry.build().eval(), args, example_kwargs=kwargs, split="percent:50", **options)


@pytest.mark.parametrize("name", MODELS)
def test_prepare(benchmark: Any, name: str) -> None:
    entry = model_zoo.entry(name)
    args, kwargs = entry.inputs(2)

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        options = {"example_kwargs": kwargs, "split": "percent:50"}
        return (entry.build().eval(), args), options

    runtime = benchmark.pedantic(prepare_split, setup=fresh, rounds=3, warmup_rounds=1)
    benchmark.extra_info["ops"] = len(runtime.plan.nodes)


@pytest.mark.parametrize("name", MODELS)
def test_resplit(benchmark: Any, name: str) -> None:
    runtime = prepared(name)
    elsewhere = benchmark.pedantic(runtime.resplit, args=("percent:25",), rounds=10, warmup_rounds=1)
    assert elsewhere.candidate.cut < runtime.candidate.cut


@pytest.mark.parametrize("name", MODELS)
def test_frontiers(benchmark: Any, name: str) -> None:
    runtime = prepared(name)
    found = benchmark.pedantic(frontiers, args=(runtime.plan,), rounds=10, warmup_rounds=1)
    assert len(found) == len(runtime.candidates)
