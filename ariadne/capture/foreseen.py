"""Foreseen: which sizes of an op's results follow from the sizes of its inputs, as its fake kernel tells.

A size that no fake kernel gives as a plain number may follow the data, whatever the op is called.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import SLoc
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch

from ariadne.capture import packed, sized
from ariadne.plan import tensors_in

PLAIN = (torch.Tensor, torch.nn.Parameter)
_TORCHS = frozenset({"aten", "prim", "prims", "quantized", "torchvision"})  # namespaces of ops
_MOST = 10_000  # kinds of calls that are known at once
_RULES = {**packed.RULES, **sized.RULES}
_UNKNOWN: list[tuple[int | None, ...]] = []
_KNOWN: dict[str, list[tuple[int | None, ...]] | None] = {}

Dims = tuple[bool | None, ...]  # of a tensor, for each dim: whether its size follows data; None if nothing tells


class Unplaced(ShapeEnv):
    """A shape environment that does not look for the lines that ask: nothing here shows them, and it takes torch's exporter."""

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:
        return SLoc(framework_loc, None), ""


def forget_real(fake: FakeTensorMode) -> None:
    """Have a mode forget the real tensors of which it has made fake ones.

    It lives on in a cycle, and its weak references to weights keep `torch.utils.swap_tensors` from taking these, and `.to()` and
    `load_state_dict` where modules swap their weights.
    """
    known: Any = fake.fake_tensor_converter.meta_converter.describer
    known.lookup_tensor.clear()


def fake_mode(sizes: ShapeEnv) -> FakeTensorMode:
    """Tensors without data, of which no C code can have an address: it would read and write memory that is none of theirs."""
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False  # else torch warns, and goes on
    return mode


def faked(mode: FakeTensorMode, t: torch.Tensor) -> torch.Tensor:
    """The tensor without data that stands for a real one of plain sizes, one for each.

    Torch's converter describes a tensor in forty fields before it makes another, and asks itself of what kind it is: a fifth of the
    time of a symbolic run. Most are weights that have their memory to themselves, of which sizes and strides tell all. Where the
    converter knows the memory, there are views to keep apart.
    """
    converter: Any = mode.fake_tensor_converter
    known: torch.Tensor | None = converter._get_memo(t)
    if known is not None:
        return known
    if not _is_plain_leaf(t):
        return mode.from_tensor(t, static_shapes=True)
    memory, of_all = t.untyped_storage(), converter.meta_converter
    if memory in of_all.describer.lookup_storage or memory.nbytes() != t.numel() * t.element_size() or not t.numel():
        return mode.from_tensor(t, static_shapes=True)
    with no_dispatch():
        empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        made: Any = FakeTensor(mode, empty, t.device)
    made.requires_grad = t.requires_grad
    if type(t) is torch.nn.Parameter:
        made._is_param = True
    of_all.storage_memo[of_all.describer.get_storage_id(memory)] = made.untyped_storage()
    converter.set_tensor_memo(t, made)
    found: torch.Tensor = made
    return found


def memory_without_data(t: torch.Tensor) -> int | None:
    """What tells the memory that a fake tensor would have from that of others; None where it is laid out in no strides."""
    return torch._C.TensorBase.untyped_storage(t)._cdata if t.layout is torch.strided else None


def stands_for(mode: FakeTensorMode, t: torch.Tensor) -> int | None:
    """The memory without data that stands for a real tensor's, whichever tensor in it came first; None where none does yet."""
    if t.layout is not torch.strided:
        return None
    converter: Any = mode.fake_tensor_converter.meta_converter
    number = converter.describer.lookup_storage.get(torch._C.TensorBase.untyped_storage(t))
    return converter.storage_memo[number]._cdata if number in converter.storage_memo else None


def _is_plain_leaf(t: torch.Tensor) -> bool:
    """Whether a tensor is like any that was just made, of which its keys tell, and no graph led to it or left it a gradient."""
    return (
        type(t) in PLAIN
        and _keys(t) == _keys_of_plain(t.device)
        and t.is_leaf
        and not t._is_view()
        and t.grad is None
        and not (t.requires_grad and getattr(t, "grad_dtype", t.dtype) != t.dtype)
    )


def _keys(t: torch.Tensor) -> int:
    keys: int = torch._C._dispatch_keys(t).raw_repr()
    return keys


@cache
def _keys_of_plain(device: torch.device) -> int:
    with no_dispatch():
        return _keys(torch.empty(0, device=device))


class Foresight:
    """What ops would make of tensors of the same sizes and other data; each kind of call is tried once.

    What torch's own ops make of plain tensors is known for the process from then on.

    >>> mask = torch.tensor([True, False, True])
    >>> Foresight().follows_data(torch.ops.aten.nonzero.default, (mask,), [mask.nonzero()])
    [(True, False)]
    """

    def __init__(self) -> None:
        self.fake = fake_mode(Unplaced())
        self.known: dict[str, list[tuple[int | None, ...]] | None] = {}

    def follows_data(self, op: OpOverload, args: Sequence[Any], outs: Sequence[Any]) -> list[Dims]:
        """For each tensor of `outs`, which the op made of `args` (in the order of its schema), and each dim: whether
        its size follows the data of the arguments. What is no tensor has no dims."""
        key = repr((op, _described(args)))
        plain = op.namespace == "aten" and all(type(t) in PLAIN for t in tensors_in((*args,)))
        known = _KNOWN if plain else self.known
        sizes = known.get(key, _UNKNOWN)
        if sizes is _UNKNOWN:
            sizes = self._sizes(op, args)
            if len(known) >= _MOST:
                known.clear()
            known[key] = sizes
        shapes = [tuple(out.shape) if isinstance(out, torch.Tensor) else () for out in outs]
        if sizes is None or [*map(len, sizes)] != [*map(len, shapes)]:
            return [(None,) * len(shape) for shape in shapes]
        # A fake kernel that tells of another size than the real one has is no witness of where it comes from.
        return [
            tuple(told != size for told, size in zip(dims, shape, strict=True))
            for dims, shape in zip(sizes, shapes, strict=True)
        ]

    def _sizes(self, op: OpOverload, args: Sequence[Any]) -> list[tuple[int | None, ...]] | None:
        """The sizes that a fake kernel gives, None where it gives no plain number; None if there is none that can tell."""
        schema = op._schema.arguments
        try:
            with _quiet(), enable_python_dispatcher(), self.fake, torch.no_grad():
                found = [self._blank(value) for value in args]
                positional = [v for arg, v in zip(schema, found, strict=True) if not arg.kwarg_only]
                keywords = {arg.name: v for arg, v in zip(schema, found, strict=True) if arg.kwarg_only}
                made = on_fake(op)(*positional, **keywords)
        except Exception:  # whatever a fake kernel, or its absence, raises
            return None
        finally:
            forget_real(self.fake)
        outs = list(made) if isinstance(made, (list, tuple)) else [made]
        return [
            tuple(n if type(n) is int else None for n in t.shape) if isinstance(t, torch.Tensor) else () for t in outs
        ]

    def _blank(self, value: Any) -> Any:
        """An argument with tensors of the same sizes in it, and no data."""
        if isinstance(value, torch.Tensor):
            if type(value) in PLAIN and value.layout is torch.strided:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return self.fake.from_tensor(value, static_shapes=True)
        if type(value) in (list, tuple):
            return type(value)(self._blank(v) for v in value)
        return value


def raised_by_data(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> bool:
    """Whether an op that raised `error` runs on tensors of the same sizes and types, as its fake kernel tells.

    So what is in them decides. A kernel that there is none of for a type, or here, is no matter of data.
    """
    of_torch = op.namespace in _TORCHS
    if of_torch and (isinstance(error, NotImplementedError) or "not implemented" in str(error)):
        return False
    foresight = Foresight()
    try:
        with _quiet(), enable_python_dispatcher(), foresight.fake, torch.no_grad():
            on_fake(op)(*map(foresight._blank, args), **{k: foresight._blank(v) for k, v in kwargs.items()})
    except (DataDependentOutputException, DynamicOutputShapeException):
        return True
    except Exception as found:  # whatever a fake kernel, or its absence, raises: sizes and types are guarded
        # Of others' ops, which need have no fake kernel, one tells that raises the same.
        return not of_torch and (type(found), str(found)) != (type(error), str(error))
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what fake kernels warn of and log where they fail, by which nobody can do anything."""
    log = logging.getLogger(torch._subclasses.fake_tensor.__name__)
    was = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return type(value), value.layout, tuple(value.shape), strides, value.dtype, value.device
    return tuple(_described(v) for v in value) if isinstance(value, (list, tuple)) else value


def on_fake(op: OpOverload) -> Callable[..., Any]:
    """What to call in place of an op where its tensors are fake: torch's own fake kernel, or ours where that is wrong or slow."""
    return _RULES.get(op, op)
