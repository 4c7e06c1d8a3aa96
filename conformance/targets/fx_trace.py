"""`torch.fx.symbolic_trace`: forward runs on proxies, and its modules are called as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from conformance.targets.base import TRACED, Captured, Target

FX_DISCLAIMS = {
    "flag": "submodules follow, a flag that forward reads does not: the documented limit on modes of modules",
    "hook": "nothing is said of hooks; those of leaf modules are theirs",
    "replaced": "nothing is said of parameters that are replaced",
    "random": "the documented limit: what is made without a proxy is a constant",
    **TRACED,
}


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Symbolic tracing needs no example; inputs that are None are given as concrete, as the documentation says."""
    names = list(model.forward.__code__.co_varnames[1 : 1 + len(args)])
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    absent = {name: None for name, value in given.items() if value is None}
    traced = fx.symbolic_trace(model, concrete_args=absent or None)
    return Captured(traced, owner=traced)


TARGET = Target(
    name="fx_trace",
    title="torch.fx.symbolic_trace",
    kind="capture",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/fx.html#limitations-of-symbolic-tracing",
    capture=capture,
    disclaims=FX_DISCLAIMS,
)
