"""What a boundary from elsewhere is held to: that it holds what the suffix needs, of the right types, sizes and devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ariadne.boundary import BoundaryPayload, sizes_of
from ariadne.errors import BoundaryError
from ariadne.plan import Expr, Value, short_dtype
from ariadne.runtime.variant import Variant


def check_values(boundary: BoundaryPayload, variant: Variant) -> None:
    """Raise `BoundaryError` unless a boundary from elsewhere holds what the suffix needs, of the right types and sizes."""
    kind = boundary.labels, boundary.batch, *(_kind(value) for value in boundary.raw)
    if kind in variant.taken:
        return
    live = variant.candidate.live
    if tuple(boundary.labels) != live:
        raise BoundaryError(
            f"the boundary holds {', '.join(boundary.labels)}; this split needs {', '.join(live)}. Send the "
            "one that run_prefix returned"
        )
    if boundary.batch not in variant.plan.batches:
        raise BoundaryError(
            f"the boundary's batch {boundary.batch} is not one that this plan serves ({variant.plan.batches}); run "
            "the prefix here at that batch once, which captures a plan for it"
        )
    env: dict[str, Any] = {variant.plan.batch_symbol: boundary.batch}
    for label, value in zip(live, boundary.raw, strict=True):
        expected = variant.plan.values[label]
        if expected.kind == "scalar" and isinstance(value, (bool, int, float)):
            env[label] = value
    _refuse_sizes(boundary, variant, env)
    for label, value in zip(live, boundary.raw, strict=True):
        expected = variant.plan.values[label]
        # The suffix itself says where a size that follows data is another than at capture.
        free = {d for name, d in variant.sized_by_data if name == label}
        _check_value(label, value, expected, env, variant, free)
    wrong = other_device(boundary, variant)
    if wrong:
        raise BoundaryError(wrong)
    seen = [k is not None and k[0] == variant.plan.values[n].dtype for n, k in zip(live, kind[2:], strict=True)]
    if all(seen):  # other dtypes hang on autocast and on the weights too, and are looked at each time
        variant.taken.put(kind, True)


def _kind(value: Any) -> Any:
    """What is looked at of a value; None, which is never taken unseen, for all but plain tensors."""
    return (value.dtype, value.shape, value.device) if type(value) is torch.Tensor and not value.is_nested else None


def _floats(variant: Variant) -> set[torch.dtype]:
    """The dtypes that a float may have for the one that the plan saw: captured inside autocast it runs outside too, and so on."""
    found = {torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    return found | {p.dtype for p in variant.model.parameters() if p.is_floating_point()}


def _refuse_sizes(boundary: BoundaryPayload, variant: Variant, env: dict[str, Any]) -> None:
    """Raise `BoundaryError` for sizes beside the batch that the plan does not serve; they are added to `env`, where they show."""
    plan = variant.plan
    within = {size.symbol: size for size in plan.sizes}
    for label, value in zip(variant.candidate.live, boundary.raw, strict=True):
        if isinstance(value, torch.Tensor) and not value.is_nested:
            for dim, now in zip(plan.values[label].shape, value.shape, strict=False):
                if isinstance(dim, Expr) and dim.source in within:
                    env.setdefault(dim.source, now)
    for symbol, size in within.items():
        if symbol in env and env[symbol] not in size.within:
            raise BoundaryError(f"the boundary's size {symbol} is {env[symbol]}; the suffix serves {size.range}")
    if within.keys() <= env.keys() and (unmet := plan.unmet(env)):
        raise BoundaryError(
            f"the suffix holds where {unmet}, which is not so at this boundary's sizes; run prefix and suffix of the same split"
        )


def other_device(boundary: BoundaryPayload, variant: Variant) -> str:
    """Where a boundary left the device of capture and its suffix is written for that one, what to do; else nothing."""
    there = {torch.device(v.device).type for label in boundary.labels if (v := variant.plan.values[label]).device}
    here = {t.device.type for t in boundary.tensors.values()}
    if here <= there:
        return ""
    suffix = variant.plan.nodes[variant.candidate.cut :]
    written = {a for n in suffix for a in (*n.args, *(v for _, v in n.kwargs)) if isinstance(a, torch.device)}
    types = {device.type for device in written} | {kind for n in suffix for kind, *_ in n.region.autocast}
    if not types & (there - here):
        return ""
    return (
        f"the boundary is on {', '.join(sorted(here))}, and this suffix makes tensors or switches autocast on "
        f"{', '.join(sorted(there))}, where it was prepared. Read it there, from_bytes(data, device={min(there)!r}); or, where "
        "this half was moved, prepare it anew"
    )


def _plain_types(label: str, variant: Variant) -> set[type]:
    """The types of what an opaque part gave there at capture, which may be None or a string too."""
    return {type(n.witness) for n in variant.plan.nodes if label in n.reads and n.target.startswith("python.opaque.")}


def _check_value(
    label: str,
    value: Any,
    expected: Value,
    env: Mapping[str, Any],
    variant: Variant,
    free: set[int],
) -> None:
    if expected.kind == "sequence":
        if not (isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in value)):
            raise BoundaryError(f"{label!r} must be a sequence of tensors; found {type(value).__name__}")
    elif expected.kind == "scalar":
        if not isinstance(value, (bool, int, float, complex)) and type(value) not in _plain_types(label, variant):
            raise BoundaryError(f"{label!r} must be a number; found {type(value).__name__}")
    elif expected.is_nested:
        if not (isinstance(value, torch.Tensor) and value.is_nested):
            raise BoundaryError(f"{label!r} must be a nested tensor; found {type(value).__name__}")
    elif expected.dtype is not None:
        if not isinstance(value, torch.Tensor):
            raise BoundaryError(f"{label!r} must be a tensor {expected.describe()}; found {type(value).__name__}")
        sizes = [
            d if isinstance(d, int) else d.evaluate(env) if d.names <= env.keys() else None for d in expected.shape
        ]
        # What a real run showed may follow its data, as the steps of a packed sequence do.
        if variant.plan.captured_by != "symbolic":
            plain = [isinstance(d, Expr) and d.source.isidentifier() for d in expected.shape]  # not one fitted to runs
            sizes = [size if held else None for held, size in zip(plain, sizes, strict=True)]
        sizes = [None if i in free else size for i, size in enumerate(sizes)]
        wrong = (
            value.is_nested
            or len(sizes) != value.dim()
            or any(s is not None and s != n for s, n in zip(sizes, value.shape, strict=False))
        )
        other = value.dtype != expected.dtype
        if wrong or (other and not (expected.dtype.is_floating_point and value.dtype in _floats(variant))):
            raise BoundaryError(
                f"{label!r} must be {expected.describe()}, here {sizes}; found {short_dtype(value.dtype)}{sizes_of(value)}"
            )
