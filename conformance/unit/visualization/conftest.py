"""Splits to draw, a folder to draw into, and a machine without Graphviz."""

from __future__ import annotations

from pathlib import Path

import pytest

import model_zoo
from ariadne import SplitRuntime, prepare_split
from conformance.unit.drawing_kit import prepared


@pytest.fixture(scope="module")
def runtime() -> SplitRuntime:
    return prepared()


@pytest.fixture(scope="module")
def resnet18() -> SplitRuntime:
    entry = model_zoo.entry("torchvision/resnet18")
    args, kwargs = entry.inputs(2)
    return prepare_split(entry.build().eval(), args, split="after:layer2", example_kwargs=kwargs)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
