"""`torch.fx` and `split_module`: traced symbolically, cut before the middle one of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from conformance.targets.base import Captured, Target
from conformance.targets.fx_trace import FX_DISCLAIMS


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Both parts are called by the module that `split_module` gives."""
    names = list(model.forward.__code__.co_varnames[1 : 1 + len(args)])
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    absent = {name: None for name, value in given.items() if value is None}
    traced = fx.symbolic_trace(model, concrete_args=absent or None)
    calls = [i for i, node in enumerate(traced.graph.nodes) if node.op.startswith("call_")]
    at = calls[len(calls) // 2] if len(calls) > 1 else len(traced.graph.nodes)
    side = {node: int(i >= at) for i, node in enumerate(traced.graph.nodes)}
    return Captured(split_module(traced, model, lambda node: side[node]))


TARGET = Target(
    name="fx_split_module",
    title="torch.fx split_module",
    kind="split",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/fx.html#limitations-of-symbolic-tracing",
    capture=capture,
    disclaims=FX_DISCLAIMS,
)
