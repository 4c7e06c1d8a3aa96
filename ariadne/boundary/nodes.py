"""Nested values as bytes: a tag and so many bytes, or a tag and so many nodes; read without running anything that the bytes say."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ariadne.errors import BoundaryError, PayloadError

MAX_DEPTH = 64  # of nested values
MAX_NODES = 1 << 20  # in one tree: an empty list is nine bytes on the wire, and about a hundred in memory
WORD = 1 << 63  # torch counts in signed 64-bit integers
U64, _HEAD = struct.Struct("<Q"), struct.Struct("<cQ")
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}

T = TypeVar("T")


class TensorRef:
    """Where a tensor stands in a value tree: `TensorRef("relu_6")` stands for `tensors["relu_6"]`.

    Not a dataclass, so that `ariadne.tree` takes it for the leaf that it is.
    """

    __slots__ = ("label",)

    def __init__(self, label: str) -> None:
        self.label = label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRef) and other.label == self.label

    def __hash__(self) -> int:
        return hash((TensorRef, self.label))

    def __repr__(self) -> str:
        return f"TensorRef(label={self.label!r})"


class _Registered(NamedTuple):
    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    schema: str


_registry: dict[str, _Registered] = {}


def register_boundary_serializer(
    type_: type[T], encode: Callable[[T], Any], decode: Callable[[Any], T], schema: str | dict[str, Any] | None = None
) -> None:
    """Let values of exactly `type_` cross the wire, in this process; registering it again replaces.

    `encode(value)` returns a tree of what `ariadne.boundary.wire.encode` takes as values, and `decode(tree)` rebuilds the value.
    The type goes by its module and qualified name. `schema`, anything that JSON can write, goes into the bytes, and
    decoding refuses any other: change it with the tree. Raises `BoundaryError` for a type that crosses by itself.

    >>> from fractions import Fraction
    >>> from ariadne.boundary.wire import decode, encode
    >>> register_boundary_serializer(Fraction, Fraction.as_integer_ratio, lambda tree: Fraction(*tree), "n, d")
    >>> decode(encode({}, {}, [Fraction(1, 3)]))[2]
    [Fraction(1, 3)]
    >>> unregister_boundary_serializer(Fraction)
    """
    if type_ in _LEAVES or type_ in _BRANCHES or issubclass(type_, Tensor):
        raise BoundaryError(f"cannot register {name_of(type_)}: values cross by themselves, tensors by their label")
    _registry[name_of(type_)] = _Registered(type_, encode, decode, json.dumps(schema, sort_keys=True, allow_nan=False))


def unregister_boundary_serializer(type_: type) -> None:
    """Forget what `register_boundary_serializer` was told of `type_`, if anything."""
    _registry.pop(name_of(type_), None)


def name_of(type_: type) -> str:
    """The module and qualified name of a type."""
    return f"{type_.__module__}.{type_.__qualname__}"


def shown(value: Any) -> str:
    """A short repr that can't fail: Python prints no int of more than 4300 digits."""
    try:
        text = repr(value[:80] if isinstance(value, (str, bytes)) else value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def need(true: bool, otherwise: str) -> None:
    """Raise `PayloadError` with these words, unless it is true."""
    if not true:
        raise PayloadError(otherwise)


def _is_made_of(value: Any, *containers: type) -> bool:
    if type(value) in containers:
        return all(_is_made_of(v, *containers) for v in value)
    return type(value) in (type(None), bool, int, float, str, bytes)


def is_header(value: Any) -> bool:
    """Whether it is a flat dict from str to plain values."""
    return type(value) is dict and all(type(k) is str and _is_made_of(v, tuple, list) for k, v in value.items())


def _dict(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    if not all(_is_made_of(key, tuple) for key in keys):
        raise ValueError("a key of a dict can't be one")
    if len({hash(key) for key in keys}) < len(keys) - 64:
        raise ValueError("keys of a dict collide, which would take quadratic time")
    found = dict(zip(keys, items[1::2], strict=True))
    if len(found) < len(keys):
        raise ValueError("a key of a dict appears twice")
    return found


def _size(items: list[Any]) -> torch.Size:
    if not all(type(n) is int and -WORD <= n < WORD for n in items):  # torch takes more than it can print
        raise ValueError("a torch.Size of something else than sizes")
    return torch.Size(items)


# By type: the tag, to bytes, from bytes.
_LEAVES: dict[type, tuple[bytes, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    type(None): (b"N", lambda v: b"", lambda b: None),
    bool: (b"?", lambda v: b"1" if v else b"0", lambda b: b == b"1"),
    int: (
        b"i",
        lambda v: v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True),
        lambda b: int.from_bytes(b, "little", signed=True),
    ),
    float: (b"f", lambda v: struct.pack("<d", v), lambda b: struct.unpack("<d", b)[0]),
    complex: (b"c", lambda v: struct.pack("<dd", v.real, v.imag), lambda b: complex(*struct.unpack("<dd", b))),
    str: (b"s", lambda v: v.encode("utf-8", "surrogatepass"), lambda b: b.decode("utf-8", "surrogatepass")),
    bytes: (b"b", bytes, bytes),
    torch.dtype: (b"d", lambda v: str(v).removeprefix("torch.").encode(), lambda b: DTYPES[b.decode()]),
    torch.device: (b"D", lambda v: str(v).encode(), lambda b: torch.device(b.decode())),
    TensorRef: (
        b"t",
        lambda v: v.label.encode("utf-8", "surrogatepass"),
        lambda b: TensorRef(b.decode("utf-8", "surrogatepass")),
    ),
}
# By type: the tag, to child nodes, from child nodes.
_BRANCHES: dict[type, tuple[bytes, Callable[[Any], Sequence[Any]], Callable[[list[Any]], Any]]] = {
    list: (b"[", list, list),
    tuple: (b"(", list, tuple),
    dict: (b"{", lambda v: [part for pair in v.items() for part in pair], _dict),
    slice: (b":", lambda v: [v.start, v.stop, v.step], lambda items: slice(*items)),
    torch.Size: (b"S", list, _size),
}
_LEAF_TAGS = {tag: write for tag, write, _ in _LEAVES.values()}
_READ: dict[bytes, Callable[[Any], Any]] = {tag: read for tag, _, read in _LEAVES.values()}
_READ |= {tag: read for tag, _, read in _BRANCHES.values()}


class Writer:
    """Writes one tree; without `labels`, one that has neither tensors nor registered types."""

    def __init__(self, labels: Collection[str] | None) -> None:
        self.out, self.labels, self.nodes = bytearray(), labels, 0

    def node(self, value: Any, where: Any, depth: int = 1) -> None:
        """Write a value; `where` it stands is a name, or the pair of where its container stands and the step from there."""
        self.nodes += 1
        kind = type(value)
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            limits = f"{MAX_DEPTH} levels or {MAX_NODES} values"
            raise BoundaryError(
                f"cannot encode {_where(where)}: more than {limits}; break cycles, send numbers as a tensor"
            )
        if kind is TensorRef and value.label not in (self.labels or ()):
            what = f"no tensor has the label {shown(value.label)}"
            raise BoundaryError(
                f"cannot encode {_where(where)}: {what}; add it to tensors, and keep references in values"
            )
        if kind in _LEAVES:
            tag, write, _ = _LEAVES[kind]
            data = write(value)
            self.out += _HEAD.pack(tag, len(data))
            self.out += data
            return
        if kind in _BRANCHES:
            tag, children = _BRANCHES[kind][0], _BRANCHES[kind][1](value)
        else:
            tag, children = b"X", self.custom(value, where)
        self.out += tag + U64.pack(len(children))
        for i, child in enumerate(children):
            step = children[i - i % 2] if kind is dict else i if kind in _BRANCHES else kind
            self.node(child, (where, step), depth + 1)
        if kind is dict and not all(_is_made_of(key, tuple) for key in value):
            raise BoundaryError(
                f"cannot encode {_where(where)}: a dict key on the wire is a str, a number, or a tuple of such"
            )

    def custom(self, value: Any, where: Any) -> Sequence[Any]:
        name, entry = name_of(type(value)), _registry.get(name_of(type(value)))
        if isinstance(value, Tensor):
            raise BoundaryError(
                f"cannot encode {_where(where)}: it is a tensor; put it into tensors, its TensorRef here"
            )
        if entry is None or entry.type is not type(value) or self.labels is None:
            todo = (
                f"call register_boundary_serializer({type(value).__name__}, encode, decode, schema), send it in values"
            )
            raise BoundaryError(f"cannot encode {_where(where)}: it is a {name}, which has no form on the wire; {todo}")
        try:
            return name, entry.schema, entry.encode(value)
        except Exception as error:
            why = f"the encoder registered for {name} failed: {error!r}"
            raise BoundaryError(f"cannot encode {_where(where)}: {why}") from error


def _where(where: Any) -> str:
    return where if isinstance(where, str) else f"{_where(where[0])}[{shown(where[1])}]"


class Reader:
    """Reads one tree, never past its bytes; without `labels`, one that has neither tensors nor registered types."""

    def __init__(self, section: str, data: bytes | memoryview) -> None:
        self.section, self.data, self.at, self.nodes = section, data, 0, 0
        self.labels: Collection[str] | None = None

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def error(self, what: str) -> PayloadError:
        advice = "refuse the sender, or use one Ariadne and torch on both sides"
        return PayloadError(f"malformed payload: {self.section}, byte {self.at}: {what}; {advice}")

    def need(self, true: bool, otherwise: str) -> None:
        if not true:
            raise self.error(otherwise)

    def take(self, size: int) -> bytes | memoryview:
        if size > self.left:
            raise self.error(f"asked for {size} bytes, found {self.left}")
        self.at += size
        return self.data[self.at - size : self.at]

    def size(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def tree(self) -> Any:
        value = self.node(1)
        self.need(not self.left, f"{self.left} bytes after the tree")
        return value

    def node(self, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise self.error(f"more than {MAX_DEPTH} levels or {MAX_NODES} values")
        if self.left < _HEAD.size:
            raise self.error(f"asked for {_HEAD.size} bytes, found {self.left}")
        tag, size = _HEAD.unpack_from(self.data, self.at)
        self.at += _HEAD.size
        write = _LEAF_TAGS.get(tag)
        if write is None and size * 9 > self.left:  # a tag and a length each
            raise self.error(f"a container of {size} values, found {self.left} bytes")
        content = bytes(self.take(size)) if write else [self.node(depth + 1) for _ in range(size)]
        if tag == b"X" and self.labels is not None and size == 3 and [type(part) for part in content[:2]] == [str, str]:
            return self.custom(*content)
        try:
            value = _READ[tag](content)
        except Exception as error:  # a KeyError of ours, a RuntimeError of torch.device: whatever the bytes provoke
            raise self.error(f"no value of kind {tag!r}: {shown(str(error))}") from None
        if write and write(value) != content:
            raise self.error(f"{shown(content)} is not how a value of kind {tag!r} is written")
        if type(value) is TensorRef and value.label not in (self.labels or ()):
            raise self.error(f"a value stands for tensor {shown(value.label)}, which is not there")
        return value

    def custom(self, name: str, schema: str, tree: Any) -> Any:
        entry = _registry.get(name)
        if entry is None:
            todo = "call register_boundary_serializer with its class before decoding, if you trust the sender with it"
            raise PayloadError(f"the payload holds a {shown(name)}, which is not registered in this process; {todo}")
        todo = f"this process expects {shown(entry.schema)}; register the same serializer on both sides"
        need(entry.schema == schema, f"the payload holds a {name} of schema {shown(schema)}, {todo}")
        try:
            return entry.decode(tree)
        except Exception as error:
            raise PayloadError(f"the decoder registered for {name} refused what it was sent: {error!r}") from error
