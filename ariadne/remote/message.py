"""Messages: a header of plain data as JSON, and bodies in the form of the boundary. No pickle; bytes from outside are data.

A request names an `op`; its reply says `ok`, or which error it was. What is wrong with a message is a `PayloadError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ariadne import errors, tree
from ariadne.boundary import TensorRef, decode, encode, header_section, joined, shown, values_section
from ariadne.errors import AriadneError, PayloadError, RemoteError

PROTOCOL = 2
MOST_HEADER = 1 << 16
MOST_PARTS = 4
Header = dict[str, Any]
Bodies = tuple[Any, ...]


def written(header: Mapping[str, Any]) -> bytes:
    """A header as bytes."""
    return _ENCODE(header).encode()


def read(frames: Sequence[Any]) -> tuple[Header, Bodies]:
    """The header and the bodies of a message, which a stranger may have sent; `PayloadError` where it is none."""
    if not 1 <= len(frames) <= MOST_PARTS:
        raise PayloadError(f"a message has 1 to {MOST_PARTS} parts; found {len(frames)}")
    first = memoryview(frames[0])
    if len(first) > MOST_HEADER:
        raise PayloadError(f"the header of a message has {len(first)} bytes; {MOST_HEADER} are the most")
    try:
        header = _DECODE(bytes(first).decode())
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the header of a message is no JSON: {str(error)[:80]}") from None
    if type(header) is not dict:
        raise PayloadError(f"the header of a message is a {type(header).__name__}, and no object")
    return header, tuple(frames[1:])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_DECODE = json.JSONDecoder(parse_constant=_no_constant).decode


def told(header: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """What stands under a key of a header; `PayloadError` where it is of another kind, or missing and there is no default."""
    value = header.get(key, default)
    if type(value) is not kind:
        raise PayloadError(f"the header's {key!r} must be of type {kind.__name__}; found {shown(value)}")
    return value


def pack(value: Any) -> bytes:
    """A tree of tensors and plain values as bytes; tensors that are one stay one."""
    if type(value) is torch.Tensor:  # as nearly all outputs are
        return joined(*_ONE, {"0": value.detach()})
    held: dict[int, tuple[str, torch.Tensor]] = {}

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return TensorRef(held.setdefault(id(leaf), (str(len(held)), leaf))[0])

    refs = tree.map_leaves(put, value)
    return encode({}, {label: t.detach() for label, t in held.values()}, refs)


_ONE = header_section({}), values_section(TensorRef("0"), ("0",))


def unpack(data: Any, *, max_bytes: int = 1 << 32) -> Any:
    """What `pack` was given, its tensors on the CPU."""
    _, tensors, values = decode(data, max_bytes=max_bytes)
    if type(values) is TensorRef:
        return tensors[values.label]
    return tree.map_leaves(lambda v: tensors[v.label] if isinstance(v, TensorRef) else v, values)


def failure(error: BaseException) -> Header:
    """What a reply says of an error."""
    if isinstance(error, AriadneError):
        return {"ok": False, "error": type(error).__name__, "words": str(error)[:4000]}
    return {"ok": False, "error": "RemoteError", "words": f"on the server: {type(error).__name__}: {str(error)[:4000]}"}


def raised(header: Header) -> AriadneError:
    """The error that a reply tells of, as this process has it: one of Ariadne's own, whatever the name."""
    kind = getattr(errors, str(header.get("error")), None)
    known = isinstance(kind, type) and issubclass(kind, AriadneError)
    made: AriadneError = (kind if known else RemoteError)(str(header.get("words"))[:4000])  # type: ignore[misc]
    return made


# --- what a step depends on beside its tensors --------------------------------------------------------------------------


def generators(devices: Sequence[str]) -> dict[str, torch.Tensor]:
    """The states of the random generators of these kinds of devices."""
    found = {"cpu": torch.get_rng_state()}
    if any(device.startswith("cuda") for device in devices):
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_generators(states: Any) -> None:
    """Put the random generators into states that were sent; `PayloadError` for what is none."""
    if type(states) is not dict or not all(
        isinstance(t, torch.Tensor) and t.dtype is torch.uint8 and t.dim() == 1 for t in states.values()
    ):
        raise PayloadError("the states of the random generators are malformed; refuse the sender")
    try:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"].cpu().contiguous())
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"].cpu().contiguous())
    except (RuntimeError, TypeError) as error:
        raise PayloadError(f"the states of the random generators are malformed: {str(error)[:200]}") from None
