"""`torch.jit.script`: the source is compiled, nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from conformance.targets.base import SNAPSHOT, Captured, Target


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """The example is not needed; a scripted module has a mode, and `train()` and `eval()` of its own."""
    scripted = torch.jit.script(model)
    return Captured(scripted, owner=scripted)


TARGET = Target(
    name="jit_script",
    title="torch.jit.script",
    kind="capture",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/jit_language_reference.html",
    capture=capture,
    disclaims=SNAPSHOT,
)
