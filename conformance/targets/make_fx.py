"""`make_fx`, the tracer of AOTAutograd: streams of ATen ops, with symbolic shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from conformance.targets.base import SNAPSHOT, TRACED, Captured, Target


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Parameters and buffers are inputs of the traced function, and those of the model are given at each call."""

    def state() -> dict[str, torch.Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def pure(held: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(model, held, args, kwargs)

    traced = make_fx(pure, tracing_mode="symbolic", _allow_non_fake_inputs=True)(state(), tuple(args), dict(kwargs))
    return Captured(lambda *a, **k: traced(state(), a, k))


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
        "state": "a function of tensors; what it writes is the caller's to keep",
    },
)
