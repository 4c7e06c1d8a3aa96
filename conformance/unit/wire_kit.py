"""What tests of the wire share: comparisons to the bit, strategies, a registered type."""

from __future__ import annotations

import itertools
import struct
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ariadne.boundary.wire import decode, encode


def bits(t: torch.Tensor) -> bytes:
    """The elements in order, bit for bit."""
    flat = torch.empty(t.shape, dtype=t.dtype, device="cpu")
    flat.copy_(t)
    return bytes(flat.reshape(-1).view(torch.uint8).tolist())


def same(a: Any, b: Any) -> bool:
    """Equal in type and bits all the way down, dict order included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_tensors(sent: dict[str, torch.Tensor]) -> None:
    """Bits, shapes, strides, sharing and the place modulo 64 survive; same bytes for the same tensors, and no alias."""
    data = bytearray(encode({}, sent, None))
    assert data == encode({}, sent, None)
    _, came, _ = decode(data)
    data[:] = b"\xff" * len(data)
    assert list(came) == list(sent)
    for label, x in sent.items():
        y = came[label]
        assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, torch.device("cpu"))
        assert type(y) is torch.Tensor
        assert y.is_leaf
        assert not y.requires_grad
        assert not y.is_inference()
        assert bits(y) == bits(x)
        assert y.untyped_storage().data_ptr() % 64 == 0
        if x.numel():
            assert y.data_ptr() % 64 == x.storage_offset() * x.itemsize % 64
    full = {label: x for label, x in sent.items() if x.numel()}
    for (a, x), (b, y) in itertools.combinations(full.items(), 2):
        shared = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        assert (came[a].untyped_storage().data_ptr() == came[b].untyped_storage().data_ptr()) is shared
        if shared:
            assert came[b].data_ptr() - came[a].data_ptr() == y.data_ptr() - x.data_ptr()


def check_values(values: Any) -> None:
    data = encode({}, {}, values)
    assert data == encode({}, {}, values)
    assert same(decode(data)[2], values)


class Angle:
    """A type of the user's own."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return type(other) is Angle and other.degrees == self.degrees

    __hash__ = None  # type: ignore[assignment]


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


def deep(n: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = None
    for _ in range(n):
        value = wrap(value)
    return value


# Registered types
