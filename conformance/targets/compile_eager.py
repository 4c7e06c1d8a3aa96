"""Dynamo: `torch.compile` with the backend "eager", which adds nothing of its own to what is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from conformance.targets.base import TRACED, Captured, Target


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Capturing is the first call; the model's state is put back by whoever asks whether it moved, since a call moves it."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    return Captured(compiled, graphs=lambda: int(counters["stats"]["unique_graphs"]))


TARGET = Target(
    name="compile_eager",
    title='torch.compile(backend="eager")',
    kind="capture",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html",
    capture=capture,
    disclaims={
        "hook": "documented: hooks of modules are not guarded unless skip_nnmodule_hook_guards=False",
        "branch-on-capture": TRACED["branch-on-capture"],
    },
)
