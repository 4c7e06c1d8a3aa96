"""`make_fx`, the tracer of AOTAutograd: streams of ATen ops, with symbolic shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from conformance.targets.base import SNAPSHOT, TRACED, Captured, Target


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """With symbols for sizes; what is traced takes the tensors in a row, parameters and buffers are attributes of the graph."""
    flat, spec = torch.utils._pytree.tree_flatten((tuple(args), dict(kwargs)))

    def function(*flat: Any) -> Any:
        args, kwargs = torch.utils._pytree.tree_unflatten(list(flat), spec)
        return model(*args, **kwargs)

    traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*flat)
    return Captured(lambda *a, **k: traced(*torch.utils._pytree.tree_leaves((a, k))))


TARGET = Target(
    name="make_fx",
    title="make_fx (AOTAutograd's tracer)",
    kind="capture",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/generated/torch.fx.experimental.proxy_tensor.make_fx.html",
    capture=capture,
    disclaims={
        **SNAPSHOT,
        **TRACED,
        "batches": "the guards of its symbols are left to the caller",
        "one": "the guards of its symbols are left to the caller",
        "gradients": "AOTAutograd traces forward and backward together; walking back through a trace of forward is not documented",
        "state": "a function of tensors; what it writes is the caller's to keep",
        "left": "a function of tensors; the state of a module that it closes over is the caller's to keep",
    },
)
