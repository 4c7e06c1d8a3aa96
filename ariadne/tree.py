"""The one walker of nested values: lists, tuples, namedtuples, dicts, dataclasses, and types known to torch's pytree."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from logging import Logger
from operator import is_
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from ariadne.errors import UnsupportedError

LEAF = "leaf"
_TOLD_BY_REPR = frozenset({"decimal", "_pydecimal", "datetime"})  # whose equal values may print differently


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """The structure of a nested value without its leaves: a kind, a class, its keys and its children.

    `kind` is one of leaf, list, tuple, size (torch.Size), namedtuple, dict, fields (a dataclass, a dict-like dataclass such as
    `transformers.ModelOutput`, a `SimpleNamespace` or a `UserDict`), mapping (another dict class), row (another class of lists or
    tuples) or registered (a type in torch's pytree registry). A plan's output may hold `subclass` too: one tensor, of that class;
    with a `context` of True or False it is a leaf of autograd's that requires a gradient, or none, such as a `Parameter` that
    forward makes.

    The keys of a namedtuple or a dataclass are all its attributes that can be leaves, and it is built from them without a call of
    its class. `beside`: further ones, such as locks and functions, which are carried as they are and make no two structures
    differ. In a plan's output they are its `context`, as (name, object), with `ANEW` for an object that each result has of its own.
    """

    kind: str
    cls: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()
    context: Any = None
    beside: Mapping[str, Any] | None = None

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


def _open(value: Any, cached: bool = False) -> tuple[Spec, list[Any]] | None:
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
    if cls is OrderedDict:
        return Spec("mapping", cls, tuple(value)), list(value.values())
    kind = kind_of(cls)
    if cls in torch_pytree.SUPPORTED_NODES and not (kind == "fields" and _is_told_by_fields(cls)):
        children, context = torch_pytree.SUPPORTED_NODES[cls].flatten_fn(value)
        return Spec("registered", cls, (), (), context), list(children)
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return _opened(Spec("namedtuple", cls, cls._fields), list(value), attributes(value), cached)
    if kind == "fields":
        if issubclass(cls, dict):
            return _open_mapping(value, attributes(value), cached)
        return _opened(Spec("fields", cls), [], attributes(value), cached)
    if kind == "row" and not attributes(value):
        return Spec("row", cls), list(value)
    return None


def _opened(spec: Spec, children: list[Any], own: Mapping[str, Any], cached: bool) -> tuple[Spec, list[Any]]:
    """The spec of an object with these attributes, beside the keys and children that it has already.

    What a `cached_property` has made of the others is none of them, unless `cached`; nor are Python's own notes.
    """
    names, further = [], {}
    every = spec.kind == "fields" and issubclass(
        spec.cls or object, _NAMESPACES
    )  # of which no class says what the fields are
    for name, value in own.items():
        made = isinstance(getattr(spec.cls, name, None), cached_property)
        if name[:2] == name[-2:] == "__" or (made and not cached):
            continue
        if every or name in getattr(spec.cls, "__dataclass_fields__", ()) or _can_be_leaf(value):
            names.append(name)
        elif not made:
            further[name] = value
    return (
        dataclasses.replace(spec, keys=(*spec.keys, *names), beside=further or None),
        [*children, *(own[name] for name in names)],
    )


def _open_mapping(value: Any, own: Mapping[str, Any], cached: bool) -> tuple[Spec, list[Any]] | None:
    """A dict that is a dataclass whose items are attributes, too; what attributes it has else lie in a `__dict__`."""
    cls = type(value)
    if not all(isinstance(k, str) and own.get(k, own) is v for k, v in value.items()):
        return None
    spec, children = Spec("fields", cls, tuple(value)), list(value.values())
    others = {n: v for n, v in own.items() if n not in value and (v is not None or getattr(cls, n, value) is not None)}
    if not others:
        return spec, children
    rest, found = _opened(Spec("dict", cls), [], others, cached)
    if not rest.keys:
        return dataclasses.replace(spec, beside=rest.beside), children
    further = dict(zip(rest.keys, found, strict=True))
    return Spec("fields", cls, (*spec.keys, "__dict__"), beside=rest.beside), [*children, further]


def attributes(value: Any) -> dict[str, Any]:
    """What stands on an object: in its slots, a dataclass's in the order of its fields, then in its `__dict__`."""
    cls, own = type(value), getattr(value, "__dict__", None) or {}
    found = {name: own[name] for name in getattr(cls, "__dataclass_fields__", ()) if name in own}
    for name, slot in _slots(cls).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # nothing stands there
            continue
    return {**found, **own}


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    made = [vars(c) for c in reversed(cls.__mro__) if "__slots__" in vars(c)]
    return {name: slot for own in made for name, slot in own.items() if type(slot) is MemberDescriptorType}


def _maker(cls: type) -> type:
    """The class of Python's, or of a library in C, that makes the objects of a class."""
    return next(c for c in cls.__mro__ if isinstance(vars(c).get("__new__"), BuiltinFunctionType))


def kind_of(cls: type) -> str | None:
    """Of which kind the objects of a class of the user's can be: fields or row, or none."""
    if issubclass(cls, _NAMESPACES):
        return "fields" if _maker(cls) in (SimpleNamespace, object) else None
    if not hasattr(cls, "__dataclass_fields__"):
        return "row" if issubclass(cls, (list, tuple)) and _maker(cls) in (list, tuple) else None
    made = _maker(cls) is object or issubclass(cls, dict)
    return "fields" if made and not issubclass(cls, (torch.nn.Module, Enum)) else None


def _is_told_by_fields(cls: type) -> bool:
    """Whether torch's pytree knows a dataclass by its fields alone: of a dict-like one, or by `register_dataclass`."""
    known = torch_pytree.SUPPORTED_NODES[cls].flatten_fn
    return issubclass(cls, dict) or getattr(known, "__module__", None) == torch_pytree.__name__


def _can_be_leaf(value: Any) -> bool:
    return isinstance(value, _LEAVES) or kind_of(type(value)) == "fields"


_NAMESPACES = (SimpleNamespace, UserDict)
_LEAVES = (
    *(torch.Tensor, bool, int, float, complex, str, list, tuple, dict, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def flatten(value: Any, cached: bool = False) -> tuple[list[Any], Spec]:
    """The leaves of a nested value in order, and its structure; `unflatten` undoes it.

    Anything that is not a known container is a leaf, None and scalars included. `cached`: with what a `cached_property` has made,
    which is part of a result, and of no call.

    >>> flatten({"a": (1, [2]), "b": None})[0]
    [1, 2, None]
    """
    leaves: list[Any] = []
    return leaves, _walk(value, leaves, cached)


def _walk(
    node: Any, leaves: list[Any], cached: bool
) -> Spec:  # no closure: a recursive one is a cycle that keeps every leaf alive
    opened = _open(node, cached)
    if opened is None:
        leaves.append(node)
        return _LEAF
    spec, children = opened
    return dataclasses.replace(spec, children=tuple([_walk(c, leaves, cached) for c in children]))


def of_any(spec: Spec, known: Callable[[Any], bool]) -> Spec:
    """A structure without what only the one value has that it is of; `known`: objects that are the same at each call."""
    if spec.kind == LEAF:
        return spec
    beside = tuple((n, v if is_shared(v) or known(v) else ANEW) for n, v in (spec.beside or {}).items())
    children = tuple([of_any(c, known) for c in spec.children])
    return dataclasses.replace(spec, children=children, context=beside or spec.context, beside=None)


def is_shared(value: Any) -> bool:
    """Whether an object is one and the same for all who have it, as a class or a function of a module is."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None and value.__defaults__ is None and value.__kwdefaults__ is None
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, ModuleType))
    return isinstance(value, (type, ModuleType, Enum, Logger))


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
    if spec.kind in ("fields", "namedtuple"):
        return _object(spec, children)
    if spec.kind == "row":
        return _row(spec.cls, children)
    if spec.kind == "mapping":
        return spec.cls(zip(spec.keys, children, strict=True))
    if spec.kind == "subclass":
        (t,) = children
        if spec.context is not None:
            return _leaf(t, spec.cls, spec.context)
        return t if type(t) is spec.cls else t.as_subclass(spec.cls)
    return torch_pytree.SUPPORTED_NODES[spec.cls].unflatten_fn(list(children), spec.context)


ANEW = "what the class makes anew"  # in a plan's output: an object that is no result's but its own, as a lock is


def _object(spec: Spec, children: Sequence[Any]) -> Any:
    """A namedtuple or a dataclass with what it had: no constructor and no `__post_init__` of its class runs, unless it has to."""
    cls: Any = spec.cls
    given = dict(zip(spec.keys, children, strict=True))
    fields = cls._fields if spec.kind == "namedtuple" else ()
    if fields:
        made = tuple.__new__(cls, children[: len(fields)])
        given = {name: v for name, v in given.items() if name not in fields}
    elif not issubclass(cls, dict):
        made = (object if _maker(cls) is object else SimpleNamespace).__new__(cls)
    else:
        maker = OrderedDict if issubclass(cls, OrderedDict) else dict
        made, further = maker.__new__(cls), given.pop("__dict__", {})
        for name, value in given.items():
            maker.__setitem__(made, name, value)
        nothing = {n: None for n in cls.__dataclass_fields__ if getattr(cls, n, cls) is None}
        given = {**nothing, **given, **further}
    if spec.context is not None:
        given = {**_made_anew(spec, dict(zip(spec.keys, children, strict=True))), **given}
    slots = _slots(cls)
    for name, value in (*given.items(), *(spec.beside or {}).items()):
        if name in slots:
            slots[name].__set__(made, value)
        else:
            made.__dict__[name] = value
    return made


def _made_anew(spec: Spec, given: Mapping[str, Any]) -> dict[str, Any]:
    """What stands on a result beside what it is given: known objects, and what its class makes when it is called with these."""
    cls: Any = spec.cls
    known = {name: value for name, value in spec.context if value is not ANEW}
    names = [name for name, value in spec.context if value is ANEW]
    if not names:
        return known
    fields: Mapping[str, Any] = getattr(cls, "__dataclass_fields__", {})
    takes = cls._fields if spec.kind == "namedtuple" else [n for n, f in fields.items() if f.init]
    try:
        found, why = attributes(cls(**{n: given[n] for n in takes if n in given})), "does not put it there"
    except Exception as error:  # of any class
        found, why = {}, f"raises {type(error).__name__}: {error}"
    lacks = next((name for name in names if name not in found), None)
    if lacks is not None:
        raise UnsupportedError(
            f"forward returns a {cls.__name__} on which {lacks!r} stands, neither a tensor, a number, a string nor a known "
            f"container, and a call of {cls.__name__} with its fields {why}; return its parts"
        )
    return {**found, **known}


def _row(cls: Any, children: Sequence[Any]) -> Any:
    """A list or a tuple of a class of its own."""
    if issubclass(cls, tuple):
        return tuple.__new__(cls, children)
    made = list.__new__(cls)
    list.extend(made, children)
    return made


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


def map_leaves(function: Callable[[Any], Any], value: Any, cached: bool = False) -> Any:
    """The same structure with `function` applied to every leaf; `cached` as `flatten` has it."""
    opened = _open(value, cached)
    if opened is None:
        return function(value)
    spec, children = opened
    return build(spec, [map_leaves(function, c, cached) for c in children])


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
