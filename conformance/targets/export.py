"""`torch.export`, not strict: forward runs in Python on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from conformance.targets.base import SNAPSHOT, TRACED, Captured, Target, batched, rows

STATIC = "documented: a value that is neither a tensor nor a size is static, a constant of the graph"
EXPORT_DISCLAIMS = {
    **SNAPSHOT,
    "python-state": "side effects on Python objects are documented as not captured",
    "python-random": STATIC,
    "branch-on-mode": STATIC,
    "branch-on-capture": TRACED["branch-on-capture"],
}


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, strict: bool = False) -> Captured:
    """`Dim.AUTO` lets it find out whether the batch may vary, as the documentation recommends."""
    batch, auto = rows(args, kwargs), torch.export.Dim.AUTO
    names = list(model.forward.__code__.co_varnames[1:])
    if len(args) > model.forward.__code__.co_argcount - 1:
        shapes: Any = (*batched(tuple(args), batch, auto), *batched(tuple(kwargs.values()), batch, auto))
    else:
        shapes = batched({**dict(zip(names, args, strict=False)), **kwargs}, batch, auto)
    program = torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=shapes, strict=strict)
    module = program.module()
    return Captured(module, owner=module)


TARGET = Target(
    name="export",
    title="torch.export",
    kind="capture",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/export.html",
    capture=partial(capture, strict=False),
    disclaims=EXPORT_DISCLAIMS,
)
