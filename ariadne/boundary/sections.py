"""The sections of a payload before its storages: written, told apart, and worked out once where they come again.

From one boundary to the next, headers, tables and values are the same, byte for byte. What was worked out for small ones is kept,
whoever sends, and bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ariadne.boundary.nodes import U64, WORD, Reader, TensorRef, Writer, is_header
from ariadne.errors import BoundaryError


class Memo(dict[Any, Any]):
    """What was worked out for small sections: from one boundary to the next, headers and tables are the same, byte for byte.

    Bounded, whoever sends: it is emptied when it is full.
    """

    def put(self, key: Any, found: Any) -> Any:
        """Keep a result, and return it."""
        if len(self) >= _MOST_KEPT:
            self.clear()
        self[key] = found
        return found


_MOST_KEPT, SMALL, _MOST_KEYS = 128, 4096, 64  # results; bytes of a section, and values, beyond which nothing is kept
_HEADERS, _TABLES, _READ_HEADERS = Memo(), Memo(), Memo()


def _written(tree: Any, section: str) -> bytes:
    """A section of plain values, with its length before it."""
    writer = Writer(None)
    writer.node(tree, section)
    return U64.pack(len(writer.out)) + writer.out


def table_section(table: tuple[Any, ...]) -> bytes:
    """The table of tensors as a payload has it."""
    if len(table[1]) > _MOST_KEYS:
        return _written(table, "table")
    return _TABLES.get(table) or _TABLES.put(table, _written(table, "table"))  # type: ignore[no-any-return]


def values_section(values: Any, labels: Collection[str]) -> bytes:
    """A tree of values as a payload has it; `labels` are those that a `TensorRef` may name."""
    writer = Writer(labels)
    writer.node(values, "values")
    return U64.pack(len(writer.out)) + writer.out


def header_section(told: Mapping[str, Any]) -> bytes:
    """A header as a payload has it."""
    header = dict(told)
    if not _is_flat(header):
        found = _written(header, "header")
        if not is_header(header):
            raise BoundaryError("cannot encode header: it is not str to plain values; put anything else into values")
        return found
    key = repr(header)  # tells 1 from True and from 1.0, which are equal
    return _HEADERS.get(key) or _HEADERS.put(key, _written(header, "header"))  # type: ignore[no-any-return]


def _is_flat(header: dict[str, Any]) -> bool:
    """Whether it is a small dict from str to plain values and tuples of these, which nobody can change once it is kept."""
    if len(header) > _MOST_KEYS:
        return False
    for key, value in header.items():
        if (
            type(key) is not str
            or not _is_small(key)
            or not (
                _is_small(value) or (type(value) is tuple and len(value) <= _MOST_KEYS and all(map(_is_small, value)))
            )
        ):
            return False
    return True


def _is_small(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return len(value) <= SMALL
    if kind is int:
        return bool(-WORD <= value < WORD)
    return value is None or kind is bool


def sections(body: memoryview) -> tuple[bytes, bytes, bytes, memoryview]:
    """Header, table, values and storages of a payload, each held against the bytes that are there."""
    found: list[Any] = []
    at, size = 0, len(body)
    for name in ("header", "table", "values", "storages"):
        start = at + U64.size
        stop = start + U64.unpack_from(body, at)[0] if start <= size else start
        if stop > size:
            where = Reader("body", body)
            where.at = min(at, size)
            raise where.error(f"{name}: asked for {stop - start or U64.size} bytes, found {max(0, size - start)}")
        found.append(body[start:stop])
        at = stop
    if at < size:
        raise Reader("body", body).error(f"{size - at} bytes after the last section")
    return bytes(found[0]), bytes(found[1]), bytes(found[2]), found[3]


def is_fixed(value: Any) -> bool:
    """Whether nobody can change it: one that was read for a payload may be given again for the next."""
    if type(value) is tuple:
        return all(map(is_fixed, value))
    return type(value) in (TensorRef, str, int, bool, float, type(None))


def read_header(section: bytes) -> dict[str, Any]:
    """A header; nobody may change it."""
    kept: dict[str, Any] | None = _READ_HEADERS.get(section)
    if kept is not None:
        return kept
    header = Reader("header", section)
    plain: dict[str, Any] = header.tree()
    header.need(is_header(plain), "it is not a flat dict from str to plain values")
    return _READ_HEADERS.put(section, plain) if len(section) <= SMALL and _is_flat(plain) else plain


def read_values(section: bytes, labels: Collection[str]) -> Any:
    """A tree of values, whose `TensorRef`s name tensors of these labels."""
    values = Reader("values", section)
    values.labels = labels
    return values.tree()
