"""Tensors in a file: in the safetensors format, each once, and read by memory map.

A tensor that is dense and alone in its memory stands in the file under its own name, for any tool to see. One that
shares memory with
others, has gaps, or is of a dtype that the format lacks is a view of bytes that stand under a name of their own; how it lies in
them is part of the half's data. Tensors begin at multiples of 64 bytes, as torch's own do: kernels may round by that.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ariadne.errors import HalfError, SpecError
from ariadne.halves.atoms import constant, count, items, need, text

ALIGN = 64
KEY = "ariadne.half"  # of the file's metadata
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


_SMALL = 1 << 16  # bytes
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Row:
    """How a tensor lies in a file: under which key, from which element, with which sizes and strides."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def told(self) -> list[Any]:
        """The same as JSON-able data."""
        return [self.key, str(self.dtype), list(self.shape), list(self.strides), self.offset]


def row(value: Any) -> Row:
    """What `Row.told` wrote."""
    parts = items(value, "a tensor")
    need(len(parts) == 5, "a tensor is malformed")
    key, dtype, shape, strides, offset = parts
    sizes = tuple(count(n, "a size", most=2**48) for n in items(shape, "a shape"))
    steps = tuple(count(n, "a stride", most=2**48) for n in items(strides, "strides"))
    need(len(sizes) == len(steps) <= 64, "a tensor has not as many strides as dims")
    return Row(text(key, "a key"), constant("dtype", dtype), sizes, steps, count(offset, "an offset", most=2**48))


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor covers, and the one after the last."""
    start = int(t.storage_offset())
    last = start + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else start
    return start * t.itemsize, last * t.itemsize


def gather(tensors: Mapping[str, torch.Tensor], data: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Row]]:
    """What to put into the file under which key, as dense tensors, and how each tensor lies there.

    One tensor under several names is kept once. Raises `HalfError` for a tensor that is no plain strided one, and for one
    on the meta device if its `data` are wanted.
    """
    storages: dict[int, list[str]] = {}
    for name, t in tensors.items():
        if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_nested or t.is_quantized:
            raise HalfError(
                f"{name!r} is a {type(t).__name__} of layout {t.layout}; a file keeps plain dense tensors. Make it one, or run "
                "this half beside the model"
            )
        if data and t.is_meta:
            raise HalfError(
                f"{name!r} is on the meta device and has no data; load the model's weights first, or pass weights=False"
            )
        storages.setdefault(t.untyped_storage()._cdata, []).append(name)
    kept: dict[str, torch.Tensor] = {}
    rows: dict[str, Row] = {}
    for names in storages.values():
        first = tensors[names[0]]
        same = all(_same(tensors[n], first) for n in names)
        if same and first.is_contiguous() and first.dtype in _NAMES and not first.is_conj() and not first.is_neg():
            kept[names[0]] = first.detach()
            rows |= {n: Row(names[0], first.dtype, tuple(first.shape), first.stride(), 0) for n in names}
            continue
        extents = [_extent(tensors[n]) for n in names]
        begin, end = min(a for a, _ in extents), max(b for _, b in extents)
        begin -= begin % max(tensors[n].itemsize for n in names)
        plain = [t for n in names if not ((t := tensors[n]).is_conj() or t.is_neg())]
        need(len(plain) == len(names), f"{names[0]!r} is a conjugate or negative view")
        raw = torch.empty(0, dtype=torch.uint8, device=first.device)
        key = f"memory of {names[0]}"
        kept[key] = raw.set_(first.untyped_storage(), begin, (end - begin,), (1,))
        for n in names:
            t = tensors[n]
            offset = int(t.storage_offset()) - begin // t.itemsize
            rows[n] = Row(key, t.dtype, tuple(t.shape), t.stride(), offset if t.numel() else 0)
    return kept, rows


def blank(rows: Mapping[str, Row]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that lie as rows say, in memory that nothing was written to yet."""
    sizes: dict[str, int] = {}
    for at in rows.values():
        last = sum((n - 1) * s for n, s in zip(at.shape, at.strides, strict=True)) + 1 if 0 not in at.shape else 0
        size = (at.offset + last) * at.dtype.itemsize
        sizes[at.key] = max(sizes.get(at.key, 0), size + -size % ALIGN)
    raw = {key: torch.empty(size, dtype=torch.uint8) for key, size in sizes.items()}
    made = {at: view_of(raw[at.key], at) for at in {*rows.values()}}
    for name, at in rows.items():
        yield name, made[at]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, a.stride(), a.storage_offset()) == (b.dtype, b.shape, b.stride(), b.storage_offset())


def view_of(raw: torch.Tensor, at: Row) -> torch.Tensor:
    """The tensor that lies in the bytes or numbers of `raw` as `at` says."""
    if raw.dtype == at.dtype and tuple(raw.shape) == at.shape and raw.stride() == at.strides and at.offset == 0:
        return raw
    size = at.dtype.itemsize
    last = (
        at.offset + sum((n - 1) * s for n, s in zip(at.shape, at.strides, strict=True)) + 1 if 0 not in at.shape else 0
    )
    need(
        raw.dim() == 1 and raw.dtype is torch.uint8 and int(last) * size <= int(raw.numel()),
        f"{at.key!r} does not hold what lies in it",
    )
    need(int(raw.storage_offset()) == 0 and int(raw.numel()) % size == 0, f"{at.key!r} is no whole number of elements")
    need(bool(last > 0) or 0 in at.shape, "a tensor is malformed")
    return torch.as_strided(raw.view(at.dtype), at.shape, at.strides, at.offset)


def _bytes(t: torch.Tensor) -> memoryview:
    """The bytes of a dense CPU tensor, without a copy; it is not kept alive by them."""
    n = t.numel() * t.itemsize
    return memoryview((ctypes.c_ubyte * n).from_address(t.data_ptr())).cast("B") if n else memoryview(b"")


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor is a plain dense one that has data."""
    return type(t) in _PLAIN and t.layout is torch.strided and not (t.is_nested or t.is_quantized or t.is_meta)


def digest(tensors: Iterable[tuple[str, torch.Tensor]], others: Mapping[str, str] = MappingProxyType({})) -> str:
    """A digest of named tensors: names, dtypes, shapes and numbers, and not how they lie in memory; and of digests of others.

    Empty where one is no plain dense tensor, or has no data: then nothing is known of the weights.
    """
    found = hashlib.sha256()
    if others:
        found.update(json.dumps(sorted(others.items())).encode())
    if not all(others.values()):
        return ""
    for name, t in sorted(tensors, key=lambda item: item[0]):
        if not is_plain(t):
            return ""
        found.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        dense = t.detach().cpu().contiguous()  # held while its bytes are read
        found.update(_bytes(dense))
    return found.hexdigest()[:32]


def write(path: str | os.PathLike[str], half: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file whose metadata hold `half`: to a file beside it first, which then takes its place."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else f"can't be made: there is no folder {str(target.parent)!r}"
        raise SpecError(f"{str(target)!r} {why}. Name a file in a folder that is there")
    order = sorted(tensors, key=lambda n: ((size := _size(tensors[n])) % ALIGN != 0, -size, n))
    header: dict[str, Any] = {"__metadata__": {KEY: half}}
    at = 0
    for name in order:
        t, size = tensors[name], _size(tensors[name])
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + size]}
        at += size
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-(len(data) + 8) % ALIGN)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(struct.pack("<Q", len(data)))
            file.write(data)
            for name in order:
                dense = tensors[name].detach().cpu().contiguous()  # held while its bytes are written
                file.write(_bytes(dense))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def _size(t: torch.Tensor) -> int:
    return t.numel() * t.itemsize


class File:
    """A safetensors file, opened: its metadata, and its tensors by memory map. What is written into them stays in this process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            opened: Any = safe_open(self.path, framework="pt", device="cpu")
            self._file = opened
            self.metadata: dict[str, str] = self._file.metadata() or {}
            self.keys: frozenset[str] = frozenset(self._file.keys())
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise HalfError(
                f"{self.path!r} is no safetensors file: {error}. Save it again, or refuse who sent it"
            ) from None

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor under a key, in memory of its own, where torch itself would begin one."""
        need(key in self.keys, f"it has no tensor {key[:80]!r}")
        try:
            found: torch.Tensor = self._file.get_tensor(key)
        except (SafetensorError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise HalfError(f"the tensor {key[:80]!r} of {self.path!r} can't be read: {str(error)[:200]}") from None
        # A small one may be an observer's, which its op resizes when it runs first: mapped memory can't be.
        copied = found.nbytes <= _SMALL or found.data_ptr() % ALIGN or found.storage_offset()
        return found.clone() if copied else found

    def tensors(self, rows: Mapping[str, Row]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor by name, one object for names that are one tensor in the file."""
        raw: dict[str, torch.Tensor] = {}
        made: dict[Row, torch.Tensor] = {}
        for name, at in rows.items():
            if at not in made:
                if at.key not in raw:
                    raw[at.key] = self.tensor(at.key)
                made[at] = view_of(raw[at.key], at)
            yield name, made[at]


def parsed(file: File) -> dict[str, Any]:
    """The half that a file's metadata hold, as JSON; `HalfError` where they hold none."""
    need(KEY in file.metadata, f"its metadata have no {KEY!r}; it may be a checkpoint, and no half")
    return parsed_text(file.metadata[KEY])


def parsed_text(half: str) -> dict[str, Any]:
    """The half that a text says, as JSON; `HalfError` where it says none."""

    def number(text: str) -> int:
        need(len(text) <= 20, "a number is too long")
        return int(text)

    def refuse(text: str) -> Any:
        raise HalfError(
            "this is not a half as Ariadne writes it: its data hold a float. Save it again, or refuse who sent it"
        )

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        need(len(found) == len(pairs), "a key appears twice")
        return found

    try:
        found = json.loads(half, parse_int=number, parse_float=refuse, parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, HalfError):
            raise
        raise HalfError(
            f"this is not a half as Ariadne writes it: its data can't be read ({str(error)[:80]}). Save it again, or "
            f"refuse who sent it"
        ) from None
    need(type(found) is dict, "its data are no object")
    return dict(found)
