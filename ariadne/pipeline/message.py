"""What a hop carries: a header as bytes without pickle, and the memory of tensors as it lies.

The header says of each tensor its dtype, shape, strides and where it begins within 64 bytes, so that the receiver makes room
for just that and lays it out as it was: kernels may round by strides and by alignment. So no size has to be known before: each
micro-batch may have its own. Tensors with gaps or repeats are sent without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne.boundary import decode, encode
from ariadne.errors import BoundaryError, PayloadError

_ALIGN = 64
Row = tuple[
    torch.dtype, tuple[int, ...], tuple[int, ...], int
]  # shape, strides, bytes by which it begins after a multiple of 64


@dataclass
class Message:
    """Named tensors, and plain data beside them: `data` is what the wire takes as values."""

    data: Any
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def narrow(t: torch.Tensor) -> torch.Tensor:
    """The tensor without the dims along which it repeats itself."""
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(dim, 0, 1)
    return t


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether such a tensor fills the memory between its first and its last element, each place once."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order in which they lie, or of a copy without gaps."""
    t = narrow(t)
    t = t.as_strided((t.numel(),), (1,)) if is_dense(t.shape, t.stride()) else t.contiguous().view(-1)
    return t.view(torch.uint8)


def packed(message: Message) -> tuple[bytes, list[torch.Tensor]]:
    """The header, and the memory to be sent after it; `BoundaryError` for what has no such form."""
    rows, memory = [], []
    with torch.inference_mode(False), torch.no_grad():
        for name, t in message.tensors.items():
            if t.layout is not torch.strided or t.is_nested or t.is_meta or t.is_quantized:
                raise BoundaryError(
                    f"{name!r} is not a dense tensor, and can't go on to another process; cut elsewhere"
                )
            t = t.detach().resolve_conj().resolve_neg()
            rows.append((name, t.dtype, tuple(t.shape), tuple(t.stride()), t.data_ptr() % _ALIGN if t.numel() else 0))
            if t.numel():
                memory.append(flat(t))
    return encode({}, {}, (rows, message.data)), memory


class Room:
    """Room for a message whose header has come: `memory` is to be filled, in order, and then `message()` is what was sent."""

    def __init__(self, header: bytes, device: torch.device) -> None:
        told = decode(header)[2]
        if not (isinstance(told, (tuple, list)) and len(told) == 2 and isinstance(told[0], (tuple, list))):
            raise PayloadError("a message between parts is malformed; run the same version of Ariadne on all ranks")
        rows, self.data = told
        self.memory: list[torch.Tensor] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._gapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.inference_mode(False), torch.no_grad():
            for name, *row in rows:
                self._tensors[name] = self._lay(tuple(row), device)

    def _lay(self, row: Row, device: torch.device) -> torch.Tensor:
        dtype, shape, strides, start = row
        if not isinstance(dtype, torch.dtype) or len(shape) != len(strides) or min((*shape, *strides, start, 0)) < 0:
            raise PayloadError("a message between parts is malformed; run the same version of Ariadne on all ranks")
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        small = [1 if s == 0 else n for n, s in zip(shape, strides, strict=True)]
        extent = 1 + sum((n - 1) * s for n, s in zip(small, strides, strict=True))
        start -= start % dtype.itemsize  # a tensor in memory that is not ours may begin at any byte
        room = torch.empty(start + extent * dtype.itemsize + _ALIGN, dtype=torch.uint8, device=device)
        start += -room.data_ptr() % _ALIGN
        made = torch.empty(0, dtype=dtype, device=device)
        made.set_(room.untyped_storage(), start // dtype.itemsize, shape, strides)
        if is_dense(tuple(small), strides):
            self.memory.append(room[start : start + extent * dtype.itemsize])
            return made
        close = torch.empty(small, dtype=dtype, device=device)
        self.memory.append(close.view(-1).view(torch.uint8))
        self._gapped.append((narrow(made), close))
        return made

    def message(self) -> Message:
        """What was sent, once the memory is filled."""
        for into, close in self._gapped:
            into.copy_(close)
        self._gapped.clear()
        return Message(self.data, self._tensors)
