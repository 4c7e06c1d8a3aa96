"""`torch.jit.trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from conformance.targets.base import SNAPSHOT, TRACED, Captured, Target


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """`strict=False` is what the documentation says for outputs that are dicts or lists."""
    if kwargs:
        names = dict(zip(_names(model), args, strict=False)) | dict(kwargs)
        traced = torch.jit.trace(model, example_kwarg_inputs=names, strict=False)
        return Captured(lambda *a, **k: traced(**dict(zip(_names(model), a, strict=False)), **k), owner=traced)
    traced = torch.jit.trace(model, tuple(args), strict=False)
    return Captured(traced, owner=traced)


def _names(model: nn.Module) -> list[str]:
    code = model.forward.__code__
    return list(code.co_varnames[1 : code.co_argcount])


TARGET = Target(
    name="jit_trace",
    title="torch.jit.trace",
    kind="capture",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/generated/torch.jit.trace.html",
    capture=capture,
    disclaims={**SNAPSHOT, **TRACED, "left": "documented: it runs the model, and again to check the trace"},
)
