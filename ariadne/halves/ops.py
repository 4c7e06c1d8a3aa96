"""Which ops a file may name: those of torch and known op libraries that compute tensors from what they are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from ariadne.errors import HalfError
from ariadne.halves.atoms import need, text
from ariadne.halves.packed import CLASS, SPACE, Packed
from ariadne.plan import Expr, Ref, TraceNode, Value

SPACES = frozenset(("aten", "torchvision"))
# What a schema does not show: these read files or memory, change settings of the process, or take apart what a tensor rests on.
DENIED = frozenset(
    """from_file set_ set set_data data_ptr resize_ resize resize_as_ resize_as resize_output_ storage_offset record_stream
    _resize_output_ _resize_output _coalesced_ _coalesced _indices _values _dimI _dimV backward _backward retain_grad
    _make_dual _unpack_dual _enter_dual_level _exit_dual_level _fw_primal _make_per_tensor_quantized_tensor
    _cufft_set_plan_cache_max_size _cufft_clear_plan_cache _use_cudnn_ctc_loss _has_same_storage_numel
    _sparse_coo_tensor_unsafe _sparse_compressed_tensor_unsafe _sparse_csr_tensor_unsafe _sparse_csc_tensor_unsafe
    _sparse_bsr_tensor_unsafe _sparse_bsc_tensor_unsafe _nested_view_from_buffer _nested_view_from_jagged
    _nested_tensor_from_tensor_list _mkldnn_reshape _lazy_clone _reshape_copy as_strided_ _reshape_alias _print
    _test_autograd_multiple_dispatch _foobar pin_memory _pin_memory is_pinned _cslt_compress rename rename_""".split()
)
_TEXTS = frozenset(
    """mode padding equation approximate reduction rounding_mode indexing reduce padding_mode ord p side padding_side driver UPLO
    norm assert_msg interpolation pad_mode""".split()
)
_DUNDERS = frozenset(f"__{i}{op}__" for i in ("", "i") for op in ("and", "or", "xor", "lshift", "rshift"))
_NUMBERS = (bool, int, float, complex, Expr)
_OBJECTS = {"Generator": torch.Generator, CLASS: Packed}
_PLAIN = {
    "int": (int, Expr, Ref, torch.dtype, torch.layout, torch.memory_format),  # which schemas state as numbers
    "SymInt": (int, Expr, Ref),
    "float": (int, float, Expr, Ref),
    "number": (*_NUMBERS, Ref),
    "Scalar": (*_NUMBERS, Ref),
    "bool": (bool, int, Expr, Ref),
    "Device": (torch.device, str),
    "str": (str,),
}


def schema_of(op: OpOverload) -> str:
    """An op's schema as a file keeps it, defaults included."""
    return str(op._schema)


def resolve(target: str) -> OpOverload:
    """The op that a plan names which was made here."""
    space, name, overload = target.split(".", 2)
    found: OpOverload = getattr(getattr(getattr(torch.ops, space), name), overload)
    return found


def find(target: str, spaces: Collection[str] = ()) -> OpOverload:
    """The op that a file names; `HalfError` for one that is not here, or that a file may not name."""
    parts = target.split(".")
    need(len(parts) == 3 and all(p.isidentifier() and p.isascii() for p in parts), f"{target!r} names no op")
    space, name, overload = parts
    if space not in (*SPACES, SPACE, *spaces):
        _refuse_library(target, space)
    need((not name.startswith("__") or name in _DUNDERS) and not overload.startswith("__"), f"{target!r} names no op")
    registered = torch._C._dispatch_has_kernel(f"{space}::{name}" + ("" if overload == "default" else f".{overload}"))
    packet = getattr(getattr(torch.ops, space), name, None) if registered else None
    op = getattr(packet, overload, None)
    if not isinstance(op, OpOverload):
        library = f"; import {space} first" if space not in ("aten", SPACE) else ""
        raise HalfError(
            f"this half uses the op {target!r}, which this process (torch {torch.__version__}) has not{library}"
        )
    if space == SPACE and space not in spaces and CLASS not in (_kind(a.type)[0] for a in op._schema.arguments):
        _refuse_library(target, space)
    why = refusal(op)
    if why:
        raise HalfError(f"this half names the op {target!r}, and {why}: no half needs it. Refuse who sent the file")
    return op


def _refuse_library(target: str, space: str) -> NoReturn:
    raise HalfError(
        f"this half uses the op {target!r} of the library {space!r}. If you trust it and who made the file, import the "
        f"library and load the half with allow=[{space + '::*'!r}]"
    )


def refusal(op: OpOverload) -> str:
    """Why a file may not name an op; empty where it may."""
    name = op._schema.name.split("::")[1]
    if name in DENIED or "_unsafe" in name.removeprefix("_unsafe_view") or "from_blob" in name:
        return "it reaches beyond the tensors that it is given"
    for arg in op._schema.arguments:
        kind = _kind(arg.type)[0]
        if kind == "str" and arg.name not in _TEXTS:
            return f"it takes a text, {arg.name!r}"
        if kind not in _PLAIN and kind not in ("Tensor", "Generator", CLASS):
            return f"it takes a {kind}"
    for ret in op._schema.returns:
        if _kind(ret.type)[0] not in (
            "Tensor",
            "int",
            "SymInt",
            "float",
            "bool",
            "number",
            "Scalar",
            "SymBool",
            "SymFloat",
        ):
            return f"it returns a {ret.type}"
    return ""


def _kind(kind: Any) -> tuple[str, bool, bool]:
    """The element type of an argument's type, whether it may be None, and whether it is a list."""
    optional = listed = False
    while kind.kind() in ("OptionalType", "ListType"):
        optional, listed = (
            optional or (kind.kind() == "OptionalType" and not listed),
            listed or kind.kind() == "ListType",
        )
        kind = kind.getElementType()
    return str(kind), optional, listed


def check(node: TraceNode, op: OpOverload, values: Mapping[str, Value], objects: Mapping[str, Any]) -> None:
    """That the arguments of an op are of the types that its schema wants, and its results as many as it gives."""
    schema = op._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    named = {a.name: a for a in schema if a.kwarg_only}
    need(len(node.args) <= len(positional), f"{node.target} has {len(node.args)} arguments")
    for arg in positional[len(node.args) :]:
        need(arg.has_default_value(), f"{node.target} lacks its argument {arg.name!r}")
    for key, _ in node.kwargs:
        need(key in named, f"{node.target} has no argument {text(key, 'an argument')!r}")
    need(len(dict(node.kwargs)) == len(node.kwargs), f"{node.target} has an argument twice")
    need(
        all(a.has_default_value() or key in dict(node.kwargs) for key, a in named.items()),
        f"{node.target} lacks an argument",
    )
    given = [*zip(positional, node.args, strict=False), *((named[k], v) for k, v in node.kwargs)]
    if op is torch.ops.aten.requires_grad_.default:
        told = node.args[0] if node.args else None
        need(
            isinstance(told, Ref) and not values[told.name].is_state,
            f"{node.target} tells a tensor of the half itself to require a gradient",
        )
    for arg, atom in given:
        kind, optional, listed = _kind(arg.type)
        if arg.is_out:
            mine = isinstance(atom, Ref) and values[atom.name].kind in ("tensor", "buffer")
            need(
                mine,
                f"{node.target} writes its result into what is neither a buffer of the half nor made by an op of it",
            )
        right = _fits(atom, kind, optional, listed, values, objects)
        if arg.name in ("dim", "dim0", "dim1") and type(atom) is int:
            right = right and abs(atom) <= 64
        need(right, f"the argument {arg.name!r} of {node.target} is not a {arg.type}")
    returns = op._schema.returns
    need(len(node.outputs) <= max(1, len(returns)) or (len(returns) == 1 and node.unpack), f"{node.target} gives less")
    need(bool(returns) or not node.outputs, f"{node.target} gives nothing")


def _fits(
    atom: Any, kind: str, optional: bool, listed: bool, values: Mapping[str, Value], objects: Mapping[str, Any]
) -> bool:
    if atom is None:
        return optional or kind == "Generator"
    if listed and isinstance(atom, tuple):
        return all((a is None and kind == "Tensor") or _fits(a, kind, False, False, values, objects) for a in atom)
    if listed and isinstance(atom, Ref):
        return atom.item is None and values[atom.name].kind == "sequence"
    if kind == "Tensor":
        # For which torch takes a number, too.
        return isinstance(atom, (*_NUMBERS, Ref)) and not (isinstance(atom, Ref) and values[atom.name].kind == "object")
    if kind in _OBJECTS:
        return isinstance(atom, Ref) and atom.item is None and isinstance(objects.get(atom.name), _OBJECTS[kind])
    if isinstance(atom, Ref):
        return values[atom.name].kind == "scalar" and Ref in _PLAIN.get(kind, ())
    return isinstance(atom, _PLAIN.get(kind, ())) and not (isinstance(atom, str) and len(atom) > 256)
