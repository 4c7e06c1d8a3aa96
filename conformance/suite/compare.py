"""The suite's one comparator: of two nested results, and of two models, node by node and bit by bit.

It shares nothing with any target, so that what it says of a target is its own observation.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import logging
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from conformance.suite.statuses import Status

_OPAQUE = (torch.Tensor, type, enum.Enum, logging.Logger, types.ModuleType, torch.Generator)
_LIBRARIES = (
    "builtins",
    "functools",
    "torch",
)  # whose callable objects, such as functions and ops, hold no state of a model
_PLAIN = (str, int, float, bool, type(None))
ABSENT = object()
REGISTRIES = ("_modules", "_parameters", "_buffers")
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where two values differ: `status` is FAIL_STRUCTURE or FAIL_ACCURACY."""

    status: Status
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where or 'the result'}: {self.what}"


def opened(node: Any) -> tuple[tuple[Any, ...], list[tuple[str, Any]]] | None:
    """One level of a nested value: what it is, and its children with the steps that lead to them; None for a leaf.

    Mappings, sequences and any object with attributes of its own are opened: dataclasses, caches, configs, modules.
    """
    cls = type(node)
    if isinstance(node, Mapping):
        return (cls, tuple(node)), [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, (list, tuple, deque)):
        names = getattr(cls, "_fields", None)
        steps = [f".{n}" for n in names] if names else [f"[{i}]" for i in range(len(node))]
        return (cls, len(node)), list(zip(steps, node, strict=True))
    if isinstance(node, partial):
        return (cls,), [(".func", node.func), (".args", node.args), (".keywords", node.keywords)]
    code = callable(node) and not isinstance(node, nn.Module) and cls.__module__.partition(".")[0] in _LIBRARIES
    if code or isinstance(node, _OPAQUE):
        return None
    attributes = getattr(node, "__dict__", None)
    if isinstance(attributes, dict):
        return (cls, tuple(attributes)), [(f".{name}", value) for name, value in attributes.items()]
    if cls.__eq__ is not object.__eq__ and not dataclasses.is_dataclass(cls):
        return None  # it says itself what it is equal to, as paths and fractions do
    slots = [n for base in cls.__mro__ for n in _listed(base.__dict__.get("__slots__", ())) if hasattr(node, n)]
    return ((cls, tuple(slots)), [(f".{name}", getattr(node, name)) for name in slots]) if slots else None


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def leaves(root: Any, *, every_path: bool = False) -> Iterator[tuple[str, Any]]:
    """Every leaf with the path to it, written as Python would.

    An object that is met again is not opened again; with `every_path` it is, but for those that hold it.
    """
    seen: set[int] = set()

    def walk(where: str, node: Any) -> Iterator[tuple[str, Any]]:
        level = opened(node)
        if level is None:
            yield where, node
        elif id(node) not in seen:
            seen.add(id(node))
            for step, child in level[1]:
                yield from walk(where + step, child)
            if every_path:
                seen.remove(id(node))

    yield from walk("", root)


def tensors(root: Any, *, every_path: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Every tensor among the leaves, with the path to it."""
    return [(where, leaf) for where, leaf in leaves(root, every_path=every_path) if isinstance(leaf, torch.Tensor)]


def difference(whole: Any, split: Any, *, gradients: bool = False) -> Difference | None:
    """The first difference between two nested values, or None; with `gradients`, those held by leaf tensors count too.

    Types, keys and their order, lengths; of tensors class, dtype, shape, strides, device, requires_grad and every bit.

    >>> str(difference({"out": torch.zeros(2)}, {"out": torch.ones(2)}))
    "['out']: values differ in 2 of 2 elements, by at most 1"
    """
    return difference_at("", whole, split, gradients=gradients)


def difference_at(where: str, whole: Any, split: Any, *, gradients: bool = False) -> Difference | None:
    """As `difference`, of two values that are found at a path."""
    return _differs(where, whole, split, partial(leaf_difference, gradients=gradients), set())


def form_difference(whole: Any, split: Any) -> Difference | None:
    """As `difference`, but of tensors only the form counts, neither their numbers nor their strides."""

    def leaf(where: str, a: Any, b: Any) -> Difference | None:
        return _of_other_form(where, a, b) if isinstance(a, torch.Tensor) else leaf_difference(where, a, b)

    return _differs("", whole, split, leaf, set())


_Leaf = Callable[[str, Any, Any], Difference | None]


def _differs(where: str, whole: Any, split: Any, leaf: _Leaf, seen: set[tuple[int, int]]) -> Difference | None:
    if type(whole) is not type(split):
        return Difference(Status.FAIL_STRUCTURE, where, f"{_name(whole)} against {_name(split)}")
    level = opened(whole)
    if level is None:
        return leaf(where, whole, split)
    if (id(whole), id(split)) in seen:
        return None
    seen.add((id(whole), id(split)))
    other = opened(split)
    assert other is not None
    if level[0] != other[0]:
        return Difference(Status.FAIL_STRUCTURE, where, f"{_shown(level[0])} against {_shown(other[0])}")
    for (step, a), (_, b) in zip(level[1], other[1], strict=True):
        found = _differs(where + step, a, b, leaf, seen)
        if found:
            return found
    return None


def model_difference(
    whole: nn.Module, split: nn.Module, caches: Mapping[tuple[str, str], Any] | None = None
) -> Difference | None:
    """The first difference between all that two models hold: modules, parameters, gradients, buffers, attributes, hooks.

    `caches` names attributes, by module path and name, that may also be as they were before the call, which is the value
    given with them.
    """
    ours, theirs = dict(whole.named_modules()), dict(split.named_modules())
    if list(ours) != list(theirs):
        return Difference(Status.FAIL_STRUCTURE, "modules", f"{sorted(ours.keys() ^ theirs.keys())} are in one of them")
    for path, a in ours.items():
        b = theirs[path]
        if type(a) is not type(b):
            return Difference(Status.FAIL_STRUCTURE, path, f"{_name(a)} against {_name(b)}")
        mine, other = vars(a), vars(b)
        for name in mine if mine.keys() == other.keys() else {**mine, **other}:
            x, y = mine.get(name, ABSENT), other.get(name, ABSENT)
            if name == "_modules" or x is y or _plainly_same(x, y):
                continue
            x, y = _hooks(name, x), _hooks(name, y)
            where = f"{path}.{name}" if path else name
            if x is ABSENT or y is ABSENT:
                held = ["no attribute" if v is ABSENT else _name(v) for v in (x, y)]
                found: Difference | None = Difference(Status.FAIL_STRUCTURE, where, " against ".join(held))
            else:
                found = difference_at(where, x, y, gradients=True)
            if found and caches is not None and (path, name) in caches and _same(_hooks(name, caches[path, name]), y):
                continue
            if found:
                return found
    return None


def moved_attributes(before: nn.Module, after: nn.Module) -> dict[tuple[str, str], Any]:
    """The plain attributes of modules that hold something else after a call than before, with what they held before.

    An attribute that was not there counts as `ABSENT`.
    """
    ours, theirs = dict(before.named_modules()), dict(after.named_modules())
    found = {}
    for path in ours.keys() & theirs.keys():
        mine, other = vars(ours[path]), vars(theirs[path])
        for name in {**mine, **other}:
            x, y = mine.get(name, ABSENT), other.get(name, ABSENT)
            if name not in REGISTRIES and name != "training" and not _same(_hooks(name, x), _hooks(name, y)):
                found[path, name] = x
    return found


def _hooks(name: str, table: Any) -> Any:
    """A table of hooks as a list: its keys count all hooks that the process ever registered."""
    kept = name.startswith("_") and "_hooks" in name and isinstance(table, dict) and all(type(k) is int for k in table)
    return list(table.values()) if kept else table


def _plainly_same(a: Any, b: Any) -> bool:
    """Whether two attributes are seen to be the same without a walk: plain values, flat tuples of such, empty tables.

    So are nine of ten that a module has.
    """
    cls = type(a)
    if cls is not type(b):
        return False
    if cls is tuple:
        return len(a) == len(b) and all(
            type(i) in _PLAIN and type(i) is type(j) and i == j for i, j in zip(a, b, strict=True)
        )
    return (not a and not b) if cls is dict or cls is OrderedDict else cls in _PLAIN and a == b


def _same(a: Any, b: Any) -> bool:
    return a is b or (a is not ABSENT and b is not ABSENT and difference(a, b) is None)


def leaf_difference(where: str, whole: Any, split: Any, gradients: bool = False) -> Difference | None:
    """How two leaves of one type differ, or None."""
    if isinstance(whole, torch.Tensor):
        return _tensor_difference(where, whole, split, gradients)
    if whole is split:
        return None
    if isinstance(whole, torch.ScriptObject):  # packed weights, which are equal to none
        return difference_at(where, whole.__getstate__(), split.__getstate__())
    if isinstance(whole, torch.Generator):
        whole, split = whole.get_state(), split.get_state()
        return _tensor_difference(where, whole, split, False)
    if hasattr(whole, "tobytes") and hasattr(whole, "dtype"):  # numpy
        if (whole.dtype, whole.shape) != (split.dtype, split.shape):
            what = f"{whole.dtype}{list(whole.shape)} against {split.dtype}{list(split.shape)}"
            return Difference(Status.FAIL_STRUCTURE, where, what)
        same = whole.tobytes() == split.tobytes()
    elif callable(whole):
        same = getattr(whole, "__qualname__", "") == getattr(split, "__qualname__", "")
    elif type(whole).__eq__ is object.__eq__:  # equal only to itself, and a copy of a model holds another
        same = True
    else:
        same = bool(whole == split) or (whole != whole and split != split)
    return None if same else Difference(Status.FAIL_ACCURACY, where, f"{whole!r} against {split!r}"[:300])


def _of_other_form(where: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    for what in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(a, what) != getattr(b, what):
            text = f"{what} {getattr(a, what)} against {getattr(b, what)}"
            return Difference(Status.FAIL_STRUCTURE, where, text)
    return None


def _tensor_difference(where: str, a: torch.Tensor, b: torch.Tensor, gradients: bool) -> Difference | None:
    other = _of_other_form(where, a, b)
    if other:
        return other
    if a.layout is torch.strided and a.stride() != b.stride():
        return Difference(Status.FAIL_STRUCTURE, where, f"stride {a.stride()} against {b.stride()}")
    if a is b:
        return None
    found = values_differ(a, b)
    if found:
        return Difference(Status.FAIL_ACCURACY, where, found)
    if gradients and a.is_leaf and b.is_leaf:
        if (a.grad is None) != (b.grad is None):
            held = ["None" if t.grad is None else "a tensor" for t in (a, b)]
            return Difference(Status.FAIL_ACCURACY, f"{where}.grad", " against ".join(held))
        if a.grad is not None and b.grad is not None:
            return _tensor_difference(f"{where}.grad", a.grad, b.grad, False)
    return None


def values_differ(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """How the bits of two tensors of one dtype and shape differ, in words; None if they are the same."""
    if a.layout is torch.sparse_coo:
        if (a._nnz(), a.sparse_dim()) != (b._nnz(), b.sparse_dim()):
            return f"{a._nnz()} entries of {a.sparse_dim()} dims against {b._nnz()} of {b.sparse_dim()}"
        return values_differ(a._indices(), b._indices()) or values_differ(a._values(), b._values())
    if a.layout is not torch.strided:
        a, b = a.detach().to_dense(), b.detach().to_dense()
    if a.is_quantized:
        if a.qscheme() != b.qscheme() or not torch.equal(a.int_repr(), b.int_repr()):
            return "another scheme, or other whole numbers"
        a, b = a.dequantize(), b.dequantize()
    a_bits, b_bits = bits(a), bits(b)
    if torch.equal(a_bits, b_bits):
        return None
    count = int((a_bits != b_bits).sum())
    return f"values differ in {count} of {a.numel()} elements, by at most {largest_gap(a, b):.3g}"


def bits(t: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers, so that NaNs and signed zeros compare by their bits."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    return (torch.view_as_real(t) if t.is_complex() else t).view(_INTEGER[t.element_size() // (1 + t.is_complex())])


def largest_gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; infinite where one is not a number."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.detach().to(wide) - b.detach().to(wide)).abs()
    equal = bits(a) == bits(b)
    gap[equal.all(-1) if a.is_complex() else equal] = 0  # where both are the same infinity or NaN
    largest = gap.max().item() if gap.numel() else 0.0
    return largest if largest == largest else float("inf")


def sharing(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, ...]]:
    """The names of tensors that share memory, in groups, in the order given; tensors without memory are left out."""
    groups: dict[int, list[str]] = {}
    for name, t in named:
        if t.layout is torch.strided and t.untyped_storage().nbytes():
            groups.setdefault(t.untyped_storage().data_ptr(), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A deep copy of a nested value in which each tensor is replaced; what was one tensor stays one."""
    found = {id(t): t for _, t in tensors(value)}
    return copy.deepcopy(value, {key: function(t) for key, t in found.items()})


def frozen(value: Any) -> Any:
    """A deep copy of a nested value, for later: tensors of the same classes with memory of their own, laid out alike, no graph."""

    def copied(t: torch.Tensor) -> torch.Tensor:
        if t.layout is torch.strided:
            held = torch.empty(0, dtype=t.dtype, device=t.device)
            held.set_(t.untyped_storage().clone(), t.storage_offset(), t.size(), t.stride())
        else:
            held = t.detach().clone()
        if type(t) is nn.Parameter:
            return nn.Parameter(held, t.requires_grad)
        made = held if type(t) is torch.Tensor else held.as_subclass(type(t))
        return made.requires_grad_(t.requires_grad)

    return mapped(copied, value)


def _name(thing: Any) -> str:
    return "None" if thing is None else type(thing).__name__


def _shown(header: tuple[Any, ...]) -> str:
    cls, *inner = header
    return f"{cls.__name__} of {', '.join(str(i if isinstance(i, int) else list(i)) for i in inner)}"
