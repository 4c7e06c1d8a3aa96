"""The one walker of nested values: lists, tuples, namedtuples, dicts, dataclasses, and types known to torch's pytree."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

LEAF = "leaf"
_TOLD_BY_REPR = frozenset({"decimal", "_pydecimal", "datetime"})  # whose equal values may print differently


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """The structure of a nested value without its leaves: a kind, a class, its keys and its children.

    `kind` is one of leaf, list, tuple, size (torch.Size), namedtuple, dict, fields (a dataclass or a dict-like dataclass such as
    `transformers.ModelOutput`), mapping (another dict class) or registered (a type in torch's pytree registry). A plan's output
    may hold `subclass` too: one tensor, of that class; with a `context` of True or False it is a leaf of autograd's that requires
    a gradient, or none, such as a `Parameter` that forward makes.
    """

    kind: str
    cls: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()
    context: Any = None

    def __eq__(self, other: object) -> bool:
        """Whether it is the same, keys by type, too: a text is not the member of an Enum that is equal to it."""
        if self is other:
            return True
        if type(other) is not Spec:
            return NotImplemented
        mine, theirs = self.keys, other.keys
        return (
            self.kind == other.kind
            and self.cls == other.cls
            and len(mine) == len(theirs)
            and (all(map(is_, mine, theirs)) or all(map(identical, mine, theirs)))
            and self.children == other.children
            and identical(self.context, other.context)
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.cls, self.keys, self.children))

    def __str__(self) -> str:
        if self.kind == LEAF:
            return "*"
        inner = [str(c) for c in self.children]
        if self.keys:
            inner = [f"{k!r}: {c}" for k, c in zip(self.keys, inner, strict=True)]
        if self.kind == "list":
            return f"[{', '.join(inner)}]"
        if self.kind == "tuple":
            return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
        if self.kind == "dict":
            return "{" + ", ".join(inner) + "}"
        return f"{self.cls.__name__ if self.cls else self.kind}({', '.join(inner)})"

    @property
    def size(self) -> int:
        """How many leaves it has."""
        return 1 if self.kind == LEAF else sum(c.size for c in self.children)


_LEAF = Spec(LEAF)


def _open(value: Any) -> tuple[Spec, list[Any]] | None:
    """One level of `value`: its spec (children still to be filled in) and its children; None for a leaf."""
    cls = type(value)
    if cls is torch.Tensor:
        return None
    if cls is list:
        return Spec("list", list), value
    if cls is tuple:
        return Spec("tuple", tuple), list(value)
    if cls is torch.Size:
        return Spec("size", torch.Size), list(value)
    if cls is dict:
        return Spec("dict", dict, tuple(value)), list(value.values())
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        own = _beside(value, cls._fields)
        return Spec("namedtuple", cls, (*cls._fields, *own)), [*value, *own.values()]
    if isinstance(value, dict) and dataclasses.is_dataclass(cls):
        return Spec("fields", cls, tuple(value)), list(value.values())
    if cls is OrderedDict:
        return Spec("mapping", cls, tuple(value)), list(value.values())
    if cls in torch_pytree.SUPPORTED_NODES:
        children, context = torch_pytree.SUPPORTED_NODES[cls].flatten_fn(value)
        return Spec("registered", cls, (), (), context), list(children)
    if dataclasses.is_dataclass(cls) and not isinstance(value, type):
        names, own = (
            tuple(f.name for f in dataclasses.fields(value) if f.init),
            _beside(value, cls.__dataclass_fields__),
        )
        return Spec("fields", cls, (*names, *own)), [*(getattr(value, n) for n in names), *own.values()]
    return None


def _beside(value: Any, fields: Collection[str]) -> dict[str, Any]:
    """The attributes of a namedtuple or a dataclass that are none of its fields, nor what a `cached_property` makes of these.

    Those that a result can hold: what else stands there, as locks and loggers do, `__post_init__` makes anew.
    """
    own = getattr(value, "__dict__", None) or {}
    more = [name for name in own if name not in fields and name[:2] != "__" and _can_be_leaf(own[name])]
    return {n: own[n] for n in more if not isinstance(getattr(type(value), n, None), cached_property)} if more else {}


def _can_be_leaf(value: Any) -> bool:
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, complex, str, list, tuple, dict))


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of a nested value in order, and its structure; `unflatten` undoes it.

    Anything that is not a known container is a leaf, None and scalars included.

    >>> flatten({"a": (1, [2]), "b": None})[0]
    [1, 2, None]
    """
    leaves: list[Any] = []
    return leaves, _walk(value, leaves)


def _walk(node: Any, leaves: list[Any]) -> Spec:  # no closure: a recursive one is a cycle that keeps every leaf alive
    opened = _open(node)
    if opened is None:
        leaves.append(node)
        return _LEAF
    spec, children = opened
    return dataclasses.replace(spec, children=tuple([_walk(c, leaves) for c in children]))


def build(spec: Spec, children: Sequence[Any]) -> Any:
    """One level: the container that `spec` describes, around `children`."""
    if spec.kind == "list":
        return list(children)
    if spec.kind == "tuple":
        return tuple(children)
    if spec.kind == "dict":
        return dict(zip(spec.keys, children, strict=True))
    assert spec.cls is not None
    if spec.kind == "size":
        return torch.Size(children)
    if spec.kind == "namedtuple":
        return _namedtuple(spec.cls, spec.keys, children)
    if spec.kind == "fields":
        return _dataclass(spec.cls, dict(zip(spec.keys, children, strict=True)))
    if spec.kind == "mapping":
        return spec.cls(zip(spec.keys, children, strict=True))
    if spec.kind == "subclass":
        (t,) = children
        if spec.context is not None:
            return _leaf(t, spec.cls, spec.context)
        return t if type(t) is spec.cls else t.as_subclass(spec.cls)
    return torch_pytree.SUPPORTED_NODES[spec.cls].unflatten_fn(list(children), spec.context)


def _namedtuple(cls: Any, keys: Sequence[str], children: Sequence[Any]) -> Any:
    """A namedtuple, past a constructor of its own, as PackedSequence has; what comes after its fields are attributes of it."""
    fields = len(cls._fields)
    found = cls._make(children[:fields])
    if len(keys) > fields:
        vars(found).update(zip(keys[fields:], children[fields:], strict=True))
    return found


def _dataclass(cls: Any, given: dict[str, Any]) -> Any:
    """A dataclass of these fields; what it has no fields for are attributes of it, unless it is a dict, too."""
    fields = cls.__dataclass_fields__
    if given.keys() <= fields.keys() or issubclass(cls, dict):
        return cls(**given)
    found = cls(**{k: v for k, v in given.items() if k in fields})
    vars(found).update((k, v) for k, v in given.items() if k not in fields)
    return found


def _leaf(t: torch.Tensor, cls: type, requires_grad: bool) -> torch.Tensor:
    """A leaf of autograd's over the memory of a tensor."""
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(t.detach(), requires_grad)
    return t.detach().as_subclass(cls).requires_grad_(requires_grad)


def subclass_of(value: Any) -> type | None:
    """The class of a tensor that only adds Python to torch's own; None for `Parameter`, and where it has a dispatch of its own."""
    cls = type(value)
    if cls is torch.Tensor or not isinstance(value, torch.Tensor) or cls in _OWN:
        return None
    return cls if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else None


_OWN = (torch.nn.Parameter, torch.nn.Buffer, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """The nested value with this structure and these leaves."""
    return _fill(spec, iter(leaves))


def _fill(node: Spec, rest: Iterator[Any]) -> Any:
    return next(rest) if node.kind == LEAF else build(node, [_fill(c, rest) for c in node.children])


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` applied to every leaf."""
    opened = _open(value)
    if opened is None:
        return function(value)
    spec, children = opened
    return build(spec, [map_leaves(function, c) for c in children])


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a nested value, in order."""
    opened = _open(value)
    if opened is None:
        yield value
    else:
        for child in opened[1]:
            yield from leaves(child)


def paths(value: Any, root: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves with where they are, written as Python would reach them: `[0]['mask']`, `.logits`."""
    opened = _open(value)
    if opened is None:
        yield root, value
        return
    spec, children = opened
    for i, child in enumerate(children):
        key = spec.keys[i] if spec.keys else i
        step = f".{key}" if spec.kind in ("fields", "namedtuple") else f"[{key!r}]"
        yield from paths(child, root + step)


def identical(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are the same in type and, if floats, in every bit, at any depth.

    >>> identical(0.0, -0.0), identical(1, True), identical(float("nan"), float("nan"))
    (False, False, True)
    """
    if a is b:
        return True
    if type(a) is not type(b) or not _same_attributes(a, b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return identical((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(identical, a, b)))
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return bool(a == b) and {(type(v), str(v)) for v in a} == {(type(v), str(v)) for v in b}
    if isinstance(a, str):  # whose class may have an `==` of its own
        return str.__eq__(a, b)
    return bool(a == b) and (type(a).__module__ not in _TOLD_BY_REPR or repr(a) == repr(b))


def _same_attributes(a: Any, b: Any) -> bool:
    """Whether two numbers, texts or tuples of one class of their own have the same attributes."""
    if not isinstance(a, (str, int, float, complex, tuple)) or type(a).__dictoffset__ == 0:
        return True
    own, other = vars(a), vars(b)
    return own.keys() == other.keys() and all(
        own[k] is other[k] or (not isinstance(own[k], torch.Tensor) and identical(own[k], other[k])) for k in own
    )
