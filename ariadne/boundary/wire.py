"""The boundary payload as bytes: written without pickle, and safe to read when a stranger sent it.

Numbers are little-endian, lengths and counts unsigned 64-bit::

    prefix    magic "ARIADNE\\n", version u16, byte order u16, CRC-32 of the rest u32, length of the rest u64
    header    length, tree: a flat dict
    table     length, tree: (each storage), ((label, dtype, shape, strides, storage, offset in bytes), ...)
    values    length, tree
    storages  length, the bytes of each storage, one after the other

A tree node is a tag and so many bytes, or a tag and so many nodes. A storage is the stretch of memory that the tensors
that share it cover: sent once, what belongs to no tensor as zeros. In the table it is its bytes; or, where that is more than the
elements of its tensors, (its bytes, the bytes that are sent): these elements, tensor by tensor, and the reader lays them
out as they were, with zeros between. It starts at a multiple of 64 bytes, in the sender's
storage as in the receiver's, so every tensor keeps its address modulo 64: the last bits of `mm` depend on it.

The checksum finds accidents, not enemies. Against those `decode` holds every length, count, depth, dtype, shape, stride
and offset against the bytes that are there before it allocates, and calls no decoder but those registered beside it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import struct
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ariadne.boundary.nodes import DTYPES, U64, WORD, Reader, name_of, shown
from ariadne.boundary.sections import (
    SMALL,
    Memo,
    header_section,
    is_fixed,
    read_header,
    read_values,
    sections,
    table_section,
    values_section,
)
from ariadne.errors import BoundaryError, PayloadError

VERSION = 2
MAX_RANK = 64  # what torch's TensorIterator takes

_MAGIC = b"ARIADNE\n"
_ORDER = 0 if sys.byteorder == "little" else 1
_PREFIX = struct.Struct("<8sHHIQ")
_ALIGN = 64  # bytes: where torch's CPU allocator starts a storage
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # copies keep NaNs' bits
_PLAIN = r"bool|u?int(8|16|32|64)|bfloat16|float(16|32|64)|complex(64|128)|float8_\w+"
_TENSOR_DTYPES = {dtype: name for name, dtype in DTYPES.items() if re.fullmatch(_PLAIN, name)}


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor], values: Any) -> bytes:
    """The payload as bytes, the same for the same input; raises `BoundaryError` for what can't cross.

    `header` is a flat dict of None, bool, int, float, str, bytes, and tuples or lists of these. `tensors` are dense
    tensors of any shape, strides and device by label; those that share storage share it after `decode`. `values` is a
    tree of the header's kinds, complex, slice, list, tuple, dict, torch dtype, device and Size, `TensorRef`, and what
    was registered. Conjugate and negative bits are resolved, so such views share nothing; requires_grad isn't sent.

    >>> from ariadne.boundary.nodes import TensorRef
    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> header, tensors, values = decode(encode({"batch": 2}, {"x": x, "xt": x.t()}, [TensorRef("xt"), None]))
    >>> tensors["x"][0, 1] = 9.0
    >>> values, tensors["xt"].shape, tensors["xt"][1, 0].item()
    ([TensorRef(label='xt'), None], torch.Size([3, 2]), 9.0)
    """
    return joined(header_section(header), values_section(values, tensors), tensors)


def joined(header: bytes, values: bytes, tensors: Mapping[str, Tensor]) -> bytes:
    """The payload of a header and values that are written already: what a boundary of the same form had before."""
    found = _alone(tensors)
    storages, table = found or _plainly(_gather, tensors)
    head = b"".join([header, table_section(table), values, U64.pack(sum(pad + len(at) for pad, at, _ in storages))])
    crc, length = zlib.crc32(head), len(head)
    chunks: list[bytes | memoryview] = [head]
    for pad, at, _ in storages:
        chunks += [bytes(pad), at] if pad else [at]
    for chunk in chunks[1:]:
        crc, length = zlib.crc32(chunk, crc), length + len(chunk)
    return b"".join([_PREFIX.pack(_MAGIC, VERSION, _ORDER, crc, length), *chunks])


def _plainly(do: Callable[..., Any], *given: Any) -> Any:
    """Call something without gradients and outside of inference mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return do(*given)
    enabled = torch._C.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return do(*given)
    finally:
        torch._C._set_grad_enabled(enabled)


def decode(
    data: bytes | bytearray | memoryview, *, max_bytes: int = 1 << 32, device: str | torch.device = "cpu"
) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """The header, tensors and values that `encode` was given; raises `PayloadError` for anything but its bytes.

    The tensors own their memory, and have the strides that they had. `max_bytes` bounds the payload, the memory of all
    tensors, and the logical size of each: one that was expanded is few bytes here and many in the next op.

    >>> decode(encode({"batch": 2}, {}, (1, "a")))
    ({'batch': 2}, {}, (1, 'a'))
    """
    form, stored = opened(data, max_bytes)
    return {**form.header}, tensors_of(form, stored, device), form.values


class Form:
    """What a payload says beside the bytes of its tensors; those that come again are one, which nobody may change."""

    __slots__ = ("alone", "header", "rows", "sizes", "told", "values")

    def __init__(
        self, header: dict[str, Any], sizes: list[tuple[int, int]], rows: dict[str, _Row], values: Any
    ) -> None:
        self.header, self.sizes, self.rows, self.values = header, sizes, rows, values
        self.alone = len(rows) == len(sizes) and all(map(_is_whole, rows.values(), sizes))
        self.told: Any = None  # what its header means to a reader, who has looked at it


def opened(data: bytes | bytearray | memoryview, max_bytes: int) -> tuple[Form, memoryview]:
    """The form of a payload, and the bytes of its tensors; `PayloadError` as `decode`."""
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise PayloadError(f"expected a payload as bytes, found {type(data).__name__} ({error})") from None
    size, start = len(view), bytes(view[: len(_MAGIC)])
    if size > max_bytes:
        raise PayloadError(f"the payload has {size} bytes, more than max_bytes={max_bytes}; raise it to take them")
    if size < _PREFIX.size or start != _MAGIC:
        raise PayloadError(f"expected a payload, {_MAGIC!r} and so on; found {size} bytes that start with {start!r}")
    _, version, order, crc, length = _PREFIX.unpack_from(view)
    if (version, order) != (VERSION, _ORDER):
        mine, theirs = f"format {VERSION}, byte order {_ORDER}", f"format {version}, byte order {order}"
        raise PayloadError(f"expected a payload of {mine}; found {theirs}; use one Ariadne on both sides")
    length += _PREFIX.size
    if length != size:
        raise PayloadError(f"expected a payload of {length} bytes, found {size}; send it again")
    if zlib.crc32(view[_PREFIX.size :]) != crc:
        raise PayloadError("the payload's checksum does not match its bytes: they changed on the way; send it again")

    header, table, valued, stored = sections(view[_PREFIX.size :])
    key = header, table, valued, len(stored), max_bytes
    return _FORMS.get(key) or _form(key), stored


def _form(key: tuple[bytes, bytes, bytes, int, int]) -> Form:
    header, table, valued, room, max_bytes = key
    plain, within = read_header(header), (table, room, max_bytes)
    sizes, rows = _READ_TABLES.get(within) or _read_table(within)
    values = read_values(valued, rows)
    found = Form(plain, sizes, rows, values)
    return _FORMS.put(key, found) if sum(map(len, key[:3])) <= SMALL and is_fixed(values) else found


_FORMS, _READ_TABLES, _DENSE = Memo(), Memo(), Memo()


def _read_table(key: tuple[bytes, int, int]) -> tuple[list[tuple[int, int]], dict[str, _Row]]:
    section, room, max_bytes = key
    found = _layout(Reader("table", section), room, max_bytes)
    return _READ_TABLES.put(key, found) if len(section) <= SMALL else found


def on_the_cpu(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Those on the CPU where others are on another device: a payload says which, and they stay there wherever it is read."""
    here = [label for label, t in tensors.items() if t.is_cpu]
    return tuple(here) if len(here) < len(tensors) else ()


def tensors_of(
    form: Form, stored: memoryview, device: str | torch.device, stay: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a payload, in memory of their own, on `device`; those that `stay` on the CPU."""
    make = _tensors_alone if form.alone else _tensors
    if form.alone and not torch.is_inference_mode_enabled():
        return make(form, stored, device, stay)
    return _plainly(make, form, stored, device, stay)  # type: ignore[no-any-return]


def _tensors(form: Form, stored: memoryview, device: str | torch.device, stay: Collection[str]) -> dict[str, Tensor]:
    sizes, rows = form.sizes, form.rows
    staying = {row.storage for label, row in rows.items() if label in stay}
    within: dict[int, list[_Row]] = {}
    if any(n != sent for n, sent in sizes):
        for row in rows.values():
            within.setdefault(row.storage, []).append(row)
    raws, at = [], 0
    for number, (n, sent) in enumerate(sizes):
        raw = torch.empty(sent, dtype=torch.uint8, device="cpu")
        _memory(raw)[:] = stored[at : at + sent]
        at += sent
        raws.append(
            (raw if sent == n else _laid_out(raw, n, within[number])).to("cpu" if number in staying else device)
        )
    return {label: _place(raws[r.storage], r.dtype, r.shape, r.strides, r.offset) for label, r in rows.items()}


def _tensors_alone(
    form: Form, stored: memoryview, device: str | torch.device, stay: Collection[str]
) -> dict[str, Tensor]:
    """The same, where each tensor is a storage, whole: it is made as it is, without views."""
    found, at = {}, 0
    for (label, row), (n, _) in zip(form.rows.items(), form.sizes, strict=True):
        t = torch.empty_strided(row.shape, row.strides, dtype=row.dtype, device="cpu")
        _bytes_at(t.data_ptr(), n)[:] = stored[at : at + n]
        at += n
        found[label] = t if device == "cpu" or label in stay else t.to(device)
    return found


def _is_whole(row: _Row, size: tuple[int, int]) -> bool:
    n, sent = size
    return 0 < n == sent == row.stop and row.offset == 0 and row.alone


class _Row(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int  # bytes
    stop: int = 0  # bytes
    alone: bool = False  # whether it is the storage of its number in the table


class _Item(NamedTuple):
    label: str
    tensor: Tensor
    storage: tuple[str, int]  # its device and address
    start: int  # bytes
    stop: int


def _stop(shape: Sequence[int], strides: Sequence[int]) -> int:
    """One past the last element, counted from the first."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no memory between the first and the last element is left out; to repeat (stride 0) leaves out nothing."""
    moves = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s > 0)
    return all(s == math.prod(n for _, n in moves[:i]) for i, (s, _) in enumerate(moves))


def _is_countable(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether torch can hold this shape and these strides, be it of no elements."""
    reach = [max(n, 1) * s for n, s in zip(shape, strides, strict=True)]
    return len(shape) <= MAX_RANK and max([math.prod(max(n, 1) for n in shape), *reach]) * itemsize < WORD


def _memory(raw: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor on the CPU, which must outlive them."""
    return _bytes_at(raw.data_ptr(), raw.numel())


def _bytes_at(address: int, n: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * n).from_address(address)).cast("B") if n else memoryview(bytearray())


def _place(raw: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """A tensor in the bytes of `raw`; all in there share one version counter, so autograd sees later writes."""
    base = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return base.as_strided(shape, strides, offset // dtype.itemsize).detach()


def _once(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The shape without what a stride of 0 repeats."""
    return [1 if stride == 0 else n for n, stride in zip(shape, strides, strict=True)]


def _bytes_once(row: _Row) -> int:
    return math.prod(_once(row.shape, row.strides)) * row.dtype.itemsize


def _laid_out(packed: Tensor, size: int, rows: Sequence[_Row]) -> Tensor:
    """A storage of so many bytes, with the elements of its tensors where they were, and zeros between."""
    raw, at = torch.zeros(size, dtype=torch.uint8, device="cpu"), 0
    for row in rows:
        once, kind, count = _once(row.shape, row.strides), _BITS[row.dtype.itemsize], _bytes_once(row)
        _place(raw, kind, once, row.strides, row.offset).copy_(packed[at : at + count].clone().view(kind).view(once))
        at += count
    return raw


def _item(label: str, t: Tensor) -> _Item:
    """The tensor without grad, conjugate and negative bits, and where it lies; refuses what is no plain memory."""
    if type(label) is not str or type(t) not in (Tensor, torch.nn.Parameter):
        why = f"labels are str and tensors plain torch.Tensor, found {name_of(type(label))} and {name_of(type(t))}"
    elif t.is_nested or t.layout != torch.strided:
        why = "it is sparse or nested; make it dense before the split"
    elif t.device.type == "meta":
        why = "it is on the meta device and has no data"
    elif t.dtype not in _TENSOR_DTYPES:
        why = f"its dtype is {t.dtype}; convert to one of {', '.join(_TENSOR_DTYPES.values())}"
    elif not _is_countable(t.shape, t.stride(), t.itemsize):
        why = f"it has {t.dim()} dims, or strides past 64 bits; at most {MAX_RANK} dims cross"
    else:
        try:
            t = t.detach().resolve_conj().resolve_neg()
            storage, start = t.untyped_storage(), int(t.storage_offset()) * t.itemsize if t.numel() else 0
            stop = start + _stop(t.shape, t.stride()) * t.itemsize
            if stop <= storage.nbytes():
                return _Item(label, t, (str(t.device), storage.data_ptr()), start, stop)
            why = f"its storage was resized to {storage.nbytes()} bytes"
        except RuntimeError as error:  # zero and vmap's tensors have no type of their own
            why = str(error).partition("\n")[0]
    raise BoundaryError(f"cannot encode tensor {shown(label)}: {why}")


_Storages = list[tuple[int, memoryview, Any]]  # zeros, the bytes after them, and who owns these


def _alone(tensors: Mapping[str, Tensor]) -> tuple[_Storages, tuple[Any, ...]] | None:
    """What `_gather` gives, for dense tensors on the CPU with a memory of its own each; None where one may be another."""
    storages: _Storages = []
    sizes: list[int] = []
    rows, taken, bases = [], [], set()
    for label, t in tensors.items():
        if (type(t) is not Tensor and type(t) is not torch.nn.Parameter) or type(label) is not str:
            return None
        if not t.is_cpu or t.layout is not torch.strided or t.is_nested or t.is_conj() or t.is_neg():
            return None
        shape, strides = tuple(t.shape), t.stride()
        key = t.dtype, shape, strides
        n = _DENSE.get(key)
        if n is None:
            known = (
                t.dtype in _TENSOR_DTYPES and _is_countable(shape, strides, t.itemsize) and _is_dense(shape, strides)
            )
            n = _DENSE.put(key, _stop(shape, strides) * t.itemsize if known else 0)
        try:
            storage, address, start = t.untyped_storage(), t.data_ptr(), int(t.storage_offset()) * t.itemsize
            if not n or not address or start + n > storage.nbytes() or address != storage.data_ptr() + start:
                return None
        except RuntimeError:  # vmap's, and others without memory: told where each is looked at
            return None
        pad = start % _ALIGN
        rows.append((label, t.dtype, shape, strides, len(sizes), pad))
        sizes.append(n + pad)
        storages.append((pad, _bytes_at(address, n), t))
        taken.append((address, address + n))
        bases.add(address - start)
    if len(taken) > 1:
        taken.sort()
        if len(bases) < len(taken) or any(one[1] > two[0] for one, two in itertools.pairwise(taken)):
            return None
    return storages, (tuple(sizes), tuple(rows))


def _gather(tensors: Mapping[str, Tensor]) -> tuple[_Storages, tuple[Any, ...]]:
    """The storages to send, and the table of what lies where."""
    items = [_item(label, tensor) for label, tensor in tensors.items()]
    groups: dict[object, list[_Item]] = {}
    for i in items:  # an empty tensor shares nothing
        groups.setdefault(i.storage if i.stop > i.start else i.label, []).append(i)
    storages: _Storages = []
    sizes, taken, placed = [], [], dict[str, tuple[int, int]]()
    for number, group in enumerate(groups.values()):
        (device, base), first, last = group[0].storage, min(i.start for i in group), max(i.stop for i in group)
        begin = first - first % _ALIGN
        packed = _packed(group, last - begin)
        pad, raw = _collect(group, begin, first, last) if packed is None else (0, packed)
        storages.append((pad, _memory(raw), raw))
        sizes.append(last - begin if packed is None else (last - begin, packed.numel()))
        placed |= {i.label: (number, i.start - begin) for i in group}
        taken += [(device, base + first, base + last, group[0].label)] if last > first else []
    for one, two in itertools.pairwise(sorted(taken)):
        if one[0] == two[0] and two[1] < one[2]:
            both = f"{shown(one[3])} and {shown(two[3])}"
            why = "they lie in one memory but two torch storages (two torch.from_numpy of one array?); clone one"
            raise BoundaryError(f"cannot encode tensors {both}: {why}")
    rows = tuple((i.label, i.tensor.dtype, tuple(i.tensor.shape), i.tensor.stride(), *placed[i.label]) for i in items)
    return storages, (tuple(sizes), rows)


def _packed(group: list[_Item], size: int) -> Tensor | None:
    """The elements of tensors with gaps, one after the other, if that is less than the memory that they lie in."""
    shapes = [_once(i.tensor.shape, i.tensor.stride()) for i in group]
    sent = sum(math.prod(once) * i.tensor.itemsize for once, i in zip(shapes, group, strict=True))
    if not 0 < sent < size - _ALIGN:
        return None
    parts = []
    for once, i in zip(shapes, group, strict=True):
        t = i.tensor.view(_BITS[i.tensor.itemsize])
        close = t.as_strided(once, t.stride()).contiguous()  # of a single number the stride may be any
        parts.append(close.as_strided((close.numel(),), (1,)).view(torch.uint8).cpu())
    return torch.cat(parts)


def _collect(group: list[_Item], begin: int, first: int, last: int) -> tuple[int, Tensor]:
    """What the tensors cover of one storage: how many zeros stand before the bytes, and the bytes up to `last`."""
    for i in group:
        if (i.start, i.stop) == (first, last) and _is_dense(i.tensor.shape, i.tensor.stride()):
            raw = torch.empty(0, dtype=torch.uint8, device=i.tensor.device)
            return first - begin, raw.set_(i.tensor.untyped_storage(), first, (last - first,), (1,)).cpu()
    raw = torch.zeros(last - begin, dtype=torch.uint8, device="cpu")
    for i in group:
        t = i.tensor.view(_BITS[i.tensor.itemsize])
        once = _once(t.shape, t.stride())
        _place(raw, t.dtype, once, t.stride(), i.start - begin).copy_(t.as_strided(once, t.stride()))
    return 0, raw


def _layout(table: Reader, room: int, max_bytes: int) -> tuple[list[tuple[int, int]], dict[str, _Row]]:
    """Sizes of storages, those sent of them, and their tensors, held against `room`, the bytes that are there."""
    tree = table.tree()
    table.need(type(tree) is tuple and [type(part) for part in tree] == [tuple, tuple], "it is not sizes and tensors")
    told, entries = tree
    pairs = [n if type(n) is tuple else (n, n) for n in told]
    known = all(len(pair) == 2 and _are_counts(pair) and pair[1] <= pair[0] for pair in pairs)
    table.need(
        known and sum(sent for _, sent in pairs) == room, f"its storages do not add up to the {room} bytes found"
    )
    memory = sum(n for n, _ in pairs)
    table.need(memory <= max_bytes, f"its storages take {memory} bytes, more than max_bytes={max_bytes}")
    sizes, packed = [n for n, _ in pairs], [sent for _, sent in pairs]
    table.need(len(sizes) <= len(entries), f"{len(sizes)} storages for {len(entries)} tensors")
    rows: dict[str, _Row] = {}
    for entry in entries:
        kinds = [str, torch.dtype, tuple, tuple, int, int]
        table.need(type(entry) is tuple and [type(part) for part in entry] == kinds, "a tensor is not its six fields")
        label, r = entry[0], _Row(*entry[1:])
        here, item = f"tensor {shown(label)}", r.dtype.itemsize
        table.need(label not in rows, f"{here} appears twice")
        table.need(r.dtype in _TENSOR_DTYPES, f"{here} is of {r.dtype}")
        table.need(
            _are_counts((*r.shape, *r.strides, r.storage, r.offset)), f"{here} has a number below 0 or past 64 bits"
        )
        table.need(len(r.shape) == len(r.strides), f"{here} has {len(r.shape)} dims, {len(r.strides)} strides")
        table.need(_is_countable(r.shape, r.strides, item), f"{here} has more than {MAX_RANK} dims, or is past 64 bits")
        table.need(r.storage < len(sizes) and r.offset % item == 0, f"{here} is in storage {r.storage} at {r.offset}")
        stop, logical = r.offset + _stop(r.shape, r.strides) * item, math.prod(r.shape) * item
        table.need(stop <= sizes[r.storage], f"{here} ends at byte {stop} of a storage of {sizes[r.storage]}")
        table.need(logical <= max_bytes, f"{here} is {logical} bytes when expanded, more than max_bytes={max_bytes}")
        packed[r.storage] -= _bytes_once(r)
        rows[label] = r._replace(stop=stop, alone=r.storage == len(rows))
    exact = all(sent == n or left == 0 for (n, sent), left in zip(pairs, packed, strict=True))
    table.need(exact, "a storage is not the elements of its tensors")
    return pairs, rows


def _are_counts(values: Sequence[Any]) -> bool:
    return all(type(n) is int and 0 <= n < WORD for n in values)
