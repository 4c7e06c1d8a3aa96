"""Tensors without data: what stands in forward for a tensor from before the cut, where forward is run without that part.

A ghost has the sizes, type and device of the tensor, so Python's logic of shapes goes on as it would. After the cut an op that
takes it gets the tensor that crossed in its place, or the call ends with an error that says what was needed.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.boundary import register_boundary_serializer
from ariadne.errors import BoundaryError
from ariadne.guards import slot_of, slots_of

_WHOLE = (
    torch.Tensor, nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, str,
    bytes, int, float, complex, type(None), torch.dtype, torch.device,
)  # fmt: skip
_Tensor: Any = torch.Tensor
_GETTERS = (
    "shape dtype device layout ndim requires_grad is_cuda is_cpu is_sparse is_quantized is_meta is_nested".split()
)
_METHODS = (
    "size dim numel nelement stride is_floating_point is_complex is_contiguous element_size __len__ __hash__".split()
)
_SWITCHES = (torch._C._set_grad_enabled,)  # what lies after the cut may stand in the same `with torch.no_grad()`
# What is as well called without data as with them: such calls are neither counted nor kept.
ANSWERED: frozenset[Any] = frozenset(
    {*(getattr(_Tensor, n).__get__ for n in _GETTERS), *(getattr(_Tensor, n) for n in _METHODS), *_SWITCHES}
)
# Where in memory a tensor's data lie, which is asked of the data that are here: what another process has there is another thing.
ADDRESSES: frozenset[Any] = frozenset(
    {_Tensor._cdata.__get__, *(getattr(_Tensor, n) for n in ("data_ptr", "const_data_ptr") if hasattr(_Tensor, n))}
)
_IS_NESTED: Any = _Tensor.is_nested.__get__
# What a nested tensor answers otherwise than one that is laid out.
_OF_SIZES: frozenset[Any] = frozenset(
    {
        _IS_NESTED,
        _Tensor.shape.__get__,
        *(getattr(_Tensor, n) for n in "size numel nelement stride is_contiguous __len__".split()),
    }
)
SET_DATA: Any = _Tensor.data.__set__  # what torch calls for `t.data = ...`


class Absent:
    """A tensor as data that has none; `kind` is its sizes, strides, type, device, and whether it requires grad and is nested.

    Of a nested one the sizes tell how many there are, and no more.

    No dataclass: those are containers to whoever walks nested values.
    """

    __slots__ = ("kind",)

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        wanting: bool,
        nested: bool = False,
    ) -> None:
        self.kind = shape, stride, dtype, device, wanting, nested

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Absent) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    @classmethod
    def of(cls, t: torch.Tensor) -> Absent | None:
        """What there is to know of a tensor; None for one that is not dense, or of a class of its own."""
        if t.layout is not torch.strided or type(t) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if t.is_nested:
            return cls((0,) * t.dim(), (0,) * t.dim(), t.dtype, t.device, t.requires_grad, True)
        return cls(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)

    @classmethod
    def read(cls, told: Any) -> Absent:
        """From a `kind` that a stranger may have written."""
        shape, stride, dtype, device, wanting, nested = told
        kinds = (dtype, torch.dtype), (device, torch.device), (wanting, bool), (nested, bool)
        sizes = type(shape) is tuple is type(stride) and len(shape) == len(stride) <= 64
        if not (sizes and all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, *stride))):
            raise ValueError("sizes and strides are tuples of ints")
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise ValueError("a dtype, a device and two flags")
        return cls(shape, stride, dtype, device, wanting, nested)


register_boundary_serializer(
    Absent, lambda absent: absent.kind, Absent.read, "shape, stride, dtype, device, wanting, nested"
)


@dataclass
class Standing:
    """What the ghosts of one call share: whether the cut was passed, which of them were used, and the first error."""

    passed: bool = False
    used: list[tuple[Any, ...]] = field(default_factory=list)
    error: BoundaryError | None = None
    watched: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)  # may not be written into; by id

    def fail(self, what: str) -> BoundaryError:
        """The error of this call, which is raised again where forward catches it."""
        self.error = self.error or BoundaryError(what)
        return self.error

    def refuse_writes(self) -> None:
        """Raise `BoundaryError` where a tensor was written into that shares its memory with another that crossed, or did not."""
        for t, version in self.watched.values():
            if not t.is_inference() and t._version != version:
                raise self.fail(
                    "after the cut forward writes into an input, or into a tensor from before it that shares memory with "
                    "another one, which would not see that from a boundary alone. Run the suffix in the process of the prefix, "
                    "once; or cut elsewhere"
                )


class Ghost(torch.Tensor):
    """A tensor without data. `at` says which it is, `told` in words; `here` is what crossed for it."""

    at: tuple[Any, ...]
    told: str
    standing: Standing
    here: torch.Tensor | None
    nested: bool

    @staticmethod
    def of(kind: Absent, at: tuple[Any, ...], told: str, standing: Standing) -> Ghost:
        """One like that."""
        shape, stride, dtype, device, wanting, nested = kind.kind
        made: Any = torch.Tensor._make_wrapper_subclass(
            Ghost, shape, strides=stride, dtype=dtype, device=device, requires_grad=wanting
        )
        made.at, made.told, made.standing, made.here, made.nested = at, told, standing, None, nested
        return made  # type: ignore[no-any-return]

    def taken(self) -> torch.Tensor:
        """What crossed for it; raises `BoundaryError` where nothing did."""
        self.standing.used.append(self.at)
        if self.here is None:
            raise self.standing.fail(
                f"after the cut forward uses {self.told} ({self.dtype}, {self.sizes()}), which did not cross: the "
                "examples of the side with the prefix did not use it there. Show that side inputs like these, by "
                "more_examples=[...], or cut elsewhere"
            )
        return self.here

    def sizes(self) -> str:
        """Its sizes, in words."""
        return "nested" if self.nested else f"of sizes {list(self.shape)}"

    def as_nested(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` tells of a nested tensor, whose sizes are not known here unless it crossed."""
        if func == _IS_NESTED:
            return True
        if self.here is None:
            raise self.standing.fail(
                f"forward asks for the sizes of {self.told}, a nested tensor from before the cut, which did not cross. Run the "
                "suffix in the process of the prefix, once; or cut elsewhere"
            )
        return func(*tree.map_leaves(settled, args), **(kwargs or {}))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ghosts = [t for t in tree.leaves((args, kwargs)) if isinstance(t, Ghost)]
        if func in _OF_SIZES and ghosts and ghosts[0].nested:
            return ghosts[0].as_nested(func, args, kwargs)
        if func in ANSWERED or not ghosts or not ghosts[0].standing.passed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        standing = ghosts[0].standing
        args, kwargs = tree.map_leaves(present, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if standing.watched:
            standing.refuse_writes()
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        ghost = next(t for t in tree.leaves((args, kwargs)) if isinstance(t, Ghost))
        where = "after" if ghost.standing.passed else "before"
        raise ghost.standing.fail(
            f"{where} the cut {func} takes {ghost.told} where that can't be followed: a scripted function or an "
            "autograd.Function takes it. Run the suffix in the process of the prefix, or cut elsewhere"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Ghost({self.told}, {self.sizes()})"


def present(value: Any) -> Any:
    """A value with what crossed in the place of a ghost."""
    return value.taken() if isinstance(value, Ghost) else value


def settled(value: Any) -> Any:
    """A value with what crossed in the place of a ghost for which something did."""
    return value.here if isinstance(value, Ghost) and value.here is not None else value


def filled(value: Any, fill: Callable[[Any], Any], seen: dict[int, Any] | None = None) -> Any:
    """A value with `fill` applied to each tensor without data in it; containers and objects are written into, tuples made anew."""
    if isinstance(value, Ghost):
        return fill(value)
    seen = {} if seen is None else seen
    if isinstance(value, _WHOLE) or id(value) in seen:
        return value
    seen[id(value)] = value  # kept, so that no other comes to have its id
    if isinstance(value, tuple):
        now = [filled(v, fill, seen) for v in value]
        if all(map(is_, now, value)):
            return value
        return value._make(now) if hasattr(value, "_make") else type(value)(now)
    if isinstance(value, (list, deque)):
        for i, v in enumerate(value):
            if (now := filled(v, fill, seen)) is not v:
                value[i] = now
    elif isinstance(value, dict):
        _fill(value, fill, seen)
    elif isinstance(value, set):
        for v in [v for v in value if isinstance(v, Ghost)]:
            value.remove(v)
            value.add(fill(v))
    for name in slots_of(value):
        v = slot_of(value, name)
        if (now := filled(v, fill, seen)) is not v:
            object.__setattr__(value, name, now)
    if isinstance(own := getattr(value, "__dict__", None), dict):
        _fill(own, fill, seen)
    return value


def _fill(table: dict[Any, Any], fill: Callable[[Any], Any], seen: dict[int, Any]) -> None:
    for key, v in [*dict.items(table)]:
        if (now := filled(v, fill, seen)) is not v:
            dict.__setitem__(table, key, now)  # the key is there: its class may have a way of its own to put things
