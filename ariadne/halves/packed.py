"""Packed weights of quantized linear layers: plain tensors in a file, from which torch packs them anew when it is read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ariadne.errors import HalfError
from ariadne.halves.atoms import items, need, text
from ariadne.halves.weights import File, Row, digest, row
from ariadne.plan import TracePlan, as_bytes

CLASS = "__torch__.torch.classes.quantized.LinearPackedParamsBase"
SPACE = "quantized"  # the library of the ops that take it
_PARTS = ("weight", "scale", "zero_point", "bias")
_ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")
_PER_TENSOR, _PER_CHANNEL = torch.per_tensor_affine, torch.per_channel_affine


@dataclass(frozen=True)
class Packed:
    """Packed weights as a file has them: by which engine they were packed, and where their parts lie."""

    engine: str
    rows: tuple[Row | None, ...]  # as `_PARTS`: integers, scales and zero points, or floats alone; a bias or none


def is_packed(thing: Any) -> bool:
    """Whether an object of torch's is one that a file can hold."""
    return isinstance(thing, torch.ScriptObject) and str(thing._type()) == CLASS


def parts_of(thing: Any) -> dict[str, torch.Tensor]:
    """The parts of packed weights, or of what a state dict has of them, as plain tensors; `HalfError` where they are not such."""
    weight, bias = thing if isinstance(thing, tuple) else thing.unpack()
    found = {"weight": weight.detach()}
    if weight.is_quantized:
        found["weight"] = weight.int_repr().contiguous()
        if weight.qscheme() is _PER_TENSOR:
            found["scale"] = torch.tensor(weight.q_scale(), dtype=torch.float64)
            found["zero_point"] = torch.tensor(weight.q_zero_point())
        elif weight.qscheme() is _PER_CHANNEL and weight.q_per_channel_axis() == 0:
            found["scale"], found["zero_point"] = weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
        else:
            raise HalfError(
                f"the weight of a quantized layer is of scheme {weight.qscheme()}, which a file can't hold; quantize it by one "
                "scale, or by one for each output"
            )
    return found if bias is None else {**found, "bias": bias.detach().clone()}


def digest_of(thing: Any) -> str:
    """A digest of packed weights, or of what a state dict has of them."""
    return digest(parts_of(thing).items())


def is_told(thing: Any) -> bool:
    """Whether an entry of a state dict is what packed weights are there: a weight, and a bias or None."""
    pair = type(thing) is tuple and len(thing) == 2 and isinstance(thing[0], torch.Tensor)
    return is_packed(thing) or (pair and isinstance(thing[1], (torch.Tensor, type(None))))


def packed_in(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The packed weights that modules of a model have, by their names in state dicts."""
    for path, module in model.named_modules():
        for key, thing in vars(module).items():
            if is_packed(thing):
                yield f"{path}.{key}".removeprefix("."), thing


def gathered(plans: Iterable[TracePlan]) -> tuple[dict[str, torch.Tensor], list[dict[str, str]]]:
    """The parts of all packed weights that plans take, each once, by names for a file; how these begin, by plan and object."""
    tensors: dict[str, torch.Tensor] = {}
    known: dict[str, str] = {}
    named: list[dict[str, str]] = []
    for plan in plans:
        named.append({})
        for n, thing in plan.objects.items():
            if is_packed(thing):
                parts = parts_of(thing)
                if (of := digest(parts.items())) not in known:
                    _refuse_engine(thing, parts)
                    known[of] = f"packed {len(known)}"
                    tensors |= {f"{known[of]} {part}": t for part, t in parts.items()}
                named[-1][n] = known[of]
    return tensors, named


def told_packed(name: str, rows: Mapping[str, Row]) -> list[Any]:
    """Packed weights whose parts have names that begin with `name`, as JSON-able data."""
    parts = [rows.get(f"{name} {part}") for part in _PARTS]
    return ["packed", torch.backends.quantized.engine, [None if p is None else p.told() for p in parts]]


def read_packed(data: list[Any]) -> Packed:
    """What `told_packed` wrote, if torch can pack what it tells of."""
    need(len(data) == 3, "packed weights are malformed")
    engine, told = text(data[1], "an engine"), items(data[2], "packed weights")
    need(engine in _ENGINES and len(told) == len(_PARTS), "packed weights are malformed")
    weight, scale, zero, bias = rows = tuple(None if p is None else row(p) for p in told)
    need(weight is not None and len(weight.shape) == 2, "packed weights have no weight of two dims")
    assert weight is not None
    whole = weight.dtype is torch.float32
    need(whole or weight.dtype is torch.int8, f"a packed weight is of {weight.dtype}")
    need((scale is None) == (zero is None) == whole, "a packed weight lacks its scale, or has one and no integers")
    outputs = weight.shape[:1]
    if scale is not None and zero is not None:
        need(
            (scale.dtype, zero.dtype) == (torch.float64, torch.int64),
            "the scale of a packed weight is of another dtype",
        )
        need(
            scale.shape == zero.shape and scale.shape in ((), outputs),
            "a packed weight has not one scale for each output",
        )
    need(
        bias is None or (bias.dtype, bias.shape) == (torch.float32, outputs),
        "the bias of a packed weight does not fit it",
    )
    need(all(p is None or _is_dense(p) for p in rows), "packed weights have gaps")
    return Packed(engine, rows)


def _is_dense(at: Row) -> bool:
    """Whether a tensor takes no more memory than its file has of it, when it is copied."""
    step = 1
    for size, stride in zip(reversed(at.shape), reversed(at.strides), strict=True):
        if size > 1 and stride != step:
            return 0 in at.shape
        step *= size
    return True


def packed_anew(one: Packed, file: File) -> Any:
    """Torch's object for the packed weights of a file; `HalfError` where it can't be made here."""
    here = torch.backends.quantized.engine
    if one.engine != here:
        raise HalfError(
            f"a quantized layer of this half was packed by the engine {one.engine!r}, and this process has {here!r}, which "
            f"computes otherwise. Set torch.backends.quantized.engine = {one.engine!r} first, or save the half under {here!r}"
        )
    found = dict(file.tensors({part: at for part, at in zip(_PARTS, one.rows, strict=True) if at is not None}))
    if "scale" in found:
        scale, zero = found["scale"], found["zero_point"]
        need(bool((scale.isfinite() & (scale > 0)).all()), "a scale of a packed weight is none")
        need(bool(((zero >= -128) & (zero <= 127)).all()), "a zero point of a packed weight is none")
    try:
        return _made(found)
    except RuntimeError as error:
        raise HalfError(
            f"a quantized layer of this half can't be packed here (engine {here!r}): {str(error).splitlines()[0][:120]}. Save the "
            "half on such a machine as this, or refuse who sent it"
        ) from None


def _made(parts: Mapping[str, torch.Tensor]) -> Any:
    weight, bias = parts["weight"], parts.get("bias")
    if "scale" not in parts:
        return torch.ops.quantized.linear_prepack_fp16(weight, bias)
    scale, zero = parts["scale"], parts["zero_point"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is to drop such tensors in time
        if scale.dim():
            weight = torch._make_per_channel_quantized_tensor(weight, scale, zero, 0)
        else:
            weight = torch._make_per_tensor_quantized_tensor(weight, float(scale), int(zero))
    return torch.ops.quantized.linear_prepack(weight, bias)


def _refuse_engine(thing: Any, parts: Mapping[str, torch.Tensor]) -> None:
    """Raise `HalfError` where weights were packed by another engine than that of now, as far as what they compute shows it."""
    op = torch.ops.quantized.linear_dynamic if "scale" in parts else torch.ops.quantized.linear_dynamic_fp16
    width = parts["weight"].shape[1]
    x = torch.linspace(-50, 70, 64 * width, dtype=torch.float32).sin().reshape(64, width)
    try:
        same = torch.equal(as_bytes(op(x, thing)), as_bytes(op(x, _made(parts))))
    except RuntimeError:  # it can't be packed by this engine at all
        same = False
    if not same:
        raise HalfError(
            f"a quantized layer computes otherwise when it is packed by the engine {torch.backends.quantized.engine!r}, which this "
            "process has now. Set torch.backends.quantized.engine to that by which the model was quantized, and save again"
        )


def refuse_others(whole: Mapping[str, str], found: Mapping[str, Any], plans: Iterable[TracePlan]) -> None:
    """Raise `HalfError` where weights given anew have other packed ones than plans take; `whole`: their digests by name."""
    mine = {digest_of(o) for plan in plans for o in plan.objects.values() if is_packed(o)}
    for name, was in whole.items():
        if was in mine and is_told(found.get(name)) and digest_of(found[name]) != was:
            raise HalfError(
                f"{name!r} is the packed weight of a quantized layer, which can't be replaced in a half, and another one is given; "
                "save the half again, from the model that has it"
            )
