"""The wire reads bytes of strangers: they decode, or raise `PayloadError` with little memory."""

from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ariadne.boundary import nodes, wire
from ariadne.boundary.nodes import TensorRef
from ariadne.boundary.wire import decode, encode
from ariadne.errors import PayloadError
from conformance.unit.wire_kit import Angle, bits, deep, same

# Bytes from a stranger


def sealed(body: bytes) -> bytes:
    """A message around this body, its checksum and length right, so that the parser proper must find what is wrong."""
    return wire._PREFIX.pack(wire._MAGIC, wire.VERSION, wire._ORDER, zlib.crc32(body), len(body)) + body


def section(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def node(value: Any, labels: Any = ()) -> bytes:
    writer = nodes.Writer(labels)
    writer.node(value, "crafted")
    return bytes(writer.out)


def raw_node(tag: bytes, size: int, data: bytes = b"") -> bytes:
    return tag + struct.pack("<Q", size) + data


def crafted(
    table: Any = ((), ()), values: bytes | None = None, storages: bytes = b"", header: bytes | None = None
) -> bytes:
    parts = (header or node({}), table if isinstance(table, bytes) else node(table), values or node(None), storages)
    return sealed(b"".join(map(section, parts)))


@contextlib.contextmanager
def no_more_than_sent(data: bytes) -> Iterator[None]:
    """Decoding may ask torch for as many bytes as the message has, in tensors of bytes."""
    asked, empty = [], torch.empty

    def watched(n: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert (dtype, device) == (torch.uint8, "cpu")
        asked.append(n)
        return empty(n, dtype=dtype, device=device)

    torch.empty = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = empty
    assert sum(asked) <= len(data)


@contextlib.contextmanager
def small_appetite(data: bytes) -> Iterator[None]:
    """Nor may Python's own memory be out of proportion with the message."""
    tracemalloc.start()
    try:
        with no_more_than_sent(data):
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000 + 30 * len(data)


def survives(data: bytes) -> bool:
    """Whether `data` decodes, to what encodes again; anything but a PayloadError otherwise is a bug."""
    try:
        with no_more_than_sent(data):
            header, came, values = decode(data, max_bytes=1 << 20)
    except PayloadError:
        return False
    again = decode(encode(header, came, values))
    assert same(again[2], values)
    assert all(bits(again[1][k]) == bits(t) for k, t in came.items() if t.numel() < 1000)
    return True


@pytest.fixture
def message(angle: None) -> bytes:
    base = torch.arange(12.0).view(3, 4)
    sent = {"b": base, "v": base[1:, ::2], "e": torch.tensor([True]).expand(2), "n": torch.empty(0, dtype=torch.int64)}
    values = [TensorRef("v"), None, True, -5, 1 << 70, 0.5, 1j, "aé", b"z", slice(1), torch.float16, Angle(1.0)]
    values += [{"k": (1,), (2,): torch.Size([3])}, torch.device("cuda:0")]
    return encode({"batch": 3, "l": ("a",)}, sent, values)


def test_every_truncation_is_refused(message: bytes) -> None:
    body = message[wire._PREFIX.size :]
    for n in range(len(message)):
        with pytest.raises(PayloadError, match="payload"):
            decode(message[:n])
    for n in range(len(body)):
        assert not survives(sealed(body[:n]))
    for more in (b"\0", b"abc", body):
        assert not survives(message + more)
        assert not survives(sealed(body + more))


def test_every_flipped_bit_is_found_by_the_checksum(message: bytes) -> None:
    for at in range(len(message)):
        for bit in range(8):
            data = bytearray(message)
            data[at] ^= 1 << bit
            with pytest.raises(PayloadError, match="payload"):
                decode(data)


def test_every_changed_byte_under_a_right_checksum_decodes_or_is_refused(message: bytes) -> None:
    body, outcomes = message[wire._PREFIX.size :], set()
    for at in range(len(body)):
        for new in {body[at] ^ 1, body[at] ^ 0x80, body[at] ^ 0xFF, 0, 0xFF, body[at] + 1 & 0xFF} - {body[at]}:
            outcomes.add(survives(sealed(body[:at] + bytes([new]) + body[at + 1 :])))
    assert outcomes == {True, False}


@given(st.data())
def test_spliced_messages_decode_or_are_refused(data: st.DataObject) -> None:
    base = torch.arange(6.0).view(2, 3)
    body = encode({"a": 1}, {"x": base, "y": base.t()}, [TensorRef("y"), {"k": [1, 2.0, "s"]}, slice(1)])[
        wire._PREFIX.size :
    ]
    parts = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        i, j, k = sorted(data.draw(st.integers(0, len(parts))) for _ in range(3))
        new = data.draw(st.one_of(st.binary(max_size=9), st.just(bytes(parts[j:k])), st.sampled_from(NUMBERS)))
        end = data.draw(st.sampled_from([i, j, i + len(new)]))
        parts[i:end] = new
    survives(sealed(bytes(parts)))


NUMBERS = [struct.pack("<Q", n) for n in (0, 1, 2, 1 << 31, 1 << 32, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)]


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    assert not survives(noise)
    assert not survives(sealed(noise))


F = torch.float32
BOMBS: dict[str, tuple[bytes, str]] = {
    "huge section": (sealed(struct.pack("<Q", 1 << 60)), "asked for 1152921504606846976 bytes, found 0"),
    "huge blob": (crafted(values=raw_node(b"b", 60 << 30)), "values, byte 9: asked for 64424509440 bytes, found 0"),
    "huge list": (crafted(values=raw_node(b"[", 1 << 62)), "a container of 4611686018427387904 values, found 0 bytes"),
    "huge dict": (crafted(values=raw_node(b"{", (1 << 64) - 1)), "a container of .* values"),
    "huge custom": (crafted(values=raw_node(b"X", 1 << 40)), "a container of .* values"),
    "60 GB storage": (
        crafted((((60 << 30),), (("x", F, (15 << 30,), (1,), 0, 0),))),
        "do not add up to the 0 bytes found",
    ),
    "60 GB of zero bytes": (
        crafted(((0,), (("x", F, (15 << 30,), (1,), 0, 0),))),
        "ends at byte 64424509440 of a storage of 0",
    ),
    "past the end": (
        crafted(((8,), (("x", F, (2,), (1,), 0, 4),)), storages=b"8" * 8),
        "ends at byte 12 of a storage of 8",
    ),
    "past by stride": (crafted(((8,), (("x", F, (2,), (2,), 0, 0),)), storages=b"8" * 8), "ends at byte 12"),
    "expanded": (
        crafted(((4,), (("x", F, (1 << 40,), (0,), 0, 0),)), storages=b"8" * 4),
        "when expanded, more than max_bytes",
    ),
    "overlapping": (
        crafted(((1024,), (("x", torch.uint8, (32,) * 10, (1,) * 10, 0, 0),)), storages=b"8" * 1024),
        "when expanded",
    ),
    "overflow": (crafted(((4,), (("x", F, (1 << 40, 1 << 40), (0, 0), 0, 0),)), storages=b"8" * 4), "past 64 bits"),
    "overflow of nothing": (crafted(((0,), (("x", F, (0, 1 << 40, 1 << 40), (0, 0, 0), 0, 0),))), "past 64 bits"),
    "overflow by stride": (crafted(((0,), (("x", F, (0, 4), (1, 1 << 61), 0, 0),))), "past 64 bits"),
    "negative stride": (
        crafted(((8,), (("x", F, (2,), (-1,), 0, 4),)), storages=b"8" * 8),
        "a number below 0 or past 64 bits",
    ),
    "negative dim": (crafted(((8,), (("x", F, (-2,), (1,), 0, 4),)), storages=b"8" * 8), "a number below 0"),
    "negative offset": (crafted(((8,), (("x", F, (2,), (1,), 0, -4),)), storages=b"8" * 8), "a number below 0"),
    "negative storage": (crafted(((8,), (("x", F, (2,), (1,), -1, 0),)), storages=b"8" * 8), "a number below 0"),
    "dim past 64 bits": (crafted(((8,), (("x", F, (1 << 64,), (0,), 0, 0),)), storages=b"8" * 8), "past 64 bits"),
    "odd offset": (crafted(((8,), (("x", F, (1,), (1,), 0, 2),)), storages=b"8" * 8), "is in storage 0 at 2"),
    "no such storage": (crafted(((8,), (("x", F, (1,), (1,), 1, 0),)), storages=b"8" * 8), "is in storage 1 at 0"),
    "negative sizes": (crafted(((16, -8), (("x", F, (1,), (1,), 0, 0),) * 2), storages=b"8" * 8), "do not add up"),
    "many storages": (crafted(((0,) * 1000, ())), "1000 storages for 0 tensors"),
    "rank": (crafted(((4,), (("x", F, (1,) * 65, (1,) * 65, 0, 0),)), storages=b"8" * 4), "more than 64 dims"),
    "rank differs": (crafted(((4,), (("x", F, (1,), (1, 1), 0, 0),)), storages=b"8" * 4), "1 dims, 2 strides"),
    "twice": (crafted(((4,), (("x", F, (1,), (1,), 0, 0),) * 2), storages=b"8" * 4), "tensor 'x' appears twice"),
    "quantized": (crafted(((4,), (("x", torch.qint8, (1,), (1,), 0, 0),)), storages=b"8" * 4), "'x' is of torch.qint8"),
    "subbyte": (crafted(((4,), (("x", torch.uint4, (1,), (1,), 0, 0),)), storages=b"8" * 4), "'x' is of torch.uint4"),
    "bool dim": (crafted(((4,), (("x", F, (True,), (1,), 0, 0),)), storages=b"8" * 4), "a number below 0"),
    "float dim": (crafted(((4,), (("x", F, (1.0,), (1,), 0, 0),)), storages=b"8" * 4), "a number below 0"),
    "list shape": (crafted(((4,), (("x", F, [1], (1,), 0, 0),)), storages=b"8" * 4), "not its six fields"),
    "row of three": (crafted(((4,), (("x", F, (1,)),)), storages=b"8" * 4), "not its six fields"),
    "row is none": (crafted(((4,), (None,)), storages=b"8" * 4), "not its six fields"),
    "no table": (crafted(node(None)), "table, byte 9: it is not sizes and tensors"),
    "table of three": (crafted(((), (), ())), "it is not sizes and tensors"),
    "reference in table": (crafted(node(TensorRef("x"), "x")), "stands for tensor 'x', which is not there"),
    "custom in table": (
        crafted(raw_node(b"X", 3, node("a") + node("b") + node(None))),
        "table, .*no value of kind b'X'",
    ),
    "custom in header": (crafted(header=raw_node(b"X", 3, node("a") + node("b") + node(None))), "header, .*kind b'X'"),
    "no header": (crafted(header=node([])), "not a flat dict from str to plain values"),
    "deep header": (crafted(header=node({"a": {}})), "not a flat dict"),
    "int keys": (crafted(header=node({1: 2})), "not a flat dict"),
    "missing tensor": (crafted(values=node(TensorRef("x"), "x")), "a value stands for tensor 'x', which is not there"),
    "unknown tag": (crafted(values=raw_node(b"Z", 0)), "no value of kind b'Z'"),
    "unknown type": (
        crafted(values=raw_node(b"X", 3, node("os.system") + node("null") + node("ls"))),
        "holds a 'os.system'",
    ),
    "type without a name": (crafted(values=raw_node(b"X", 3, node(1) * 3)), "no value of kind b'X'"),
    "not UTF-8": (crafted(values=raw_node(b"s", 1, b"\xff")), "no value of kind b's'"),
    "reference not UTF-8": (crafted(values=raw_node(b"t", 1, b"\xff")), "no value of kind b't'"),
    "third bool": (crafted(values=raw_node(b"?", 1, b"2")), "is not how a value of kind b'\\?' is written"),
    "padded int": (crafted(values=raw_node(b"i", 2, b"\0\0")), "is not how a value of kind b'i' is written"),
    "short float": (crafted(values=raw_node(b"f", 7, b"8" * 7)), "no value of kind b'f'"),
    "no dtype": (crafted(values=raw_node(b"d", 4, b"load")), "no value of kind b'd'"),
    "no device": (crafted(values=raw_node(b"D", 8, b"cuda:300")), "is not how a value of kind b'D' is written"),
    "retired device": (crafted(values=raw_node(b"D", 6, b"mkldnn")), "kind b'D'"),
    "slice of two": (crafted(values=raw_node(b":", 0)), "no value of kind b':'"),
    "size of texts": (crafted(values=raw_node(b"S", 1, node("a"))), "no value of kind b'S'"),
    "size past 64 bits": (crafted(values=raw_node(b"S", 1, node(1 << 64))), "no value of kind b'S'"),
    "key without value": (crafted(values=raw_node(b"{", 1, node(1))), "no value of kind b'{'"),
    "key twice": (crafted(values=raw_node(b"{", 4, node(1) * 4)), "a key of a dict appears twice"),
    "key equal to another": (crafted(values=raw_node(b"{", 4, node(1) * 2 + node(True) * 2)), "appears twice"),
    "unhashable key": (crafted(values=raw_node(b"{", 2, node([]) * 2)), "a key of a dict can't be one"),
    "huge key": (crafted(values=raw_node(b"{", 4, node(10**5000) * 4)), "a key of a dict appears twice"),
    "colliding keys": (
        crafted(values=raw_node(b"{", 40_000, b"".join(node(i * (2**61 - 1)) * 2 for i in range(20_000)))),
        "keys of a dict collide, which would take quadratic time",
    ),
    "deep list": (crafted(values=b"".join(raw_node(b"[", 1) for _ in range(100_000))), "more than 64 levels"),
    "deep key": (crafted(values=b"".join(raw_node(b"{", 2) for _ in range(100_000))), "more than 64 levels"),
    "bytes after the tree": (crafted(values=node(1) + b"1"), "values, byte 10: 1 bytes after the tree"),
    "bytes after the sections": (sealed(section(node({})) * 5), "bytes after the last section"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_crafted_message_is_refused_with_its_reason_and_little_memory(name: str) -> None:
    data, words = BOMBS[name]
    with small_appetite(data), pytest.raises(PayloadError, match=words):
        decode(data)


def test_crafting_can_also_make_a_good_message() -> None:
    """Or else the refusals above would prove nothing."""
    good = crafted(
        ((8,), (("x", F, (2,), (1,), 0, 0),)), node([TensorRef("x")], "x"), struct.pack("<ff", 1, 2), node({"a": 1})
    )
    header, came, values = decode(good)
    assert (header, came["x"].tolist(), values) == ({"a": 1}, [1, 2], [TensorRef("x")])


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode({}, {}, [None] * 200)
    monkeypatch.setattr(nodes, "MAX_NODES", 100)
    with pytest.raises(PayloadError, match="more than 64 levels or 100 values"):
        decode(data)


def test_depth_does_not_depend_on_how_deep_the_caller_is() -> None:
    data = encode({}, {}, deep(nodes.MAX_DEPTH - 1, lambda v: [v]))

    def down(n: int) -> Any:
        return down(n - 1) if n else decode(data)

    down(sys.getrecursionlimit() - 400)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "expected a payload, b'ARIADNE.n' and so on; found 0 bytes"),
        (lambda data: b"\x80\x04" + data[2:], "found .* bytes that start with b'.x80.x04IADNE.n'"),
        (lambda data: data[:20], "found 20 bytes"),
        (
            lambda data: data[:8] + b"\1\0" + data[10:],
            "of format 2, byte order 0; found format 1, .* one Ariadne on both sides",
        ),
        (lambda data: data[:10] + b"\1\0" + data[12:], "found format 2, byte order 1"),
        (lambda data: data[:-1], "expected a payload of [0-9]+ bytes, found [0-9]+; send it again"),
        (lambda data: data[:-1] + b"\0", "checksum does not match its bytes: they changed on the way; send it again"),
        (lambda data: 3, "expected a payload as bytes, found int"),
        (lambda data: data.hex(), "expected a payload as bytes, found str"),
        (lambda data: memoryview(data)[::2], "expected a payload as bytes, found memoryview"),
        (lambda data: None, "found NoneType"),
    ],
)
def test_errors_say_what_was_found_and_what_to_do(change: Callable[[bytes], Any], words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        decode(change(encode({}, {"x": torch.ones(3)}, [1])))


def test_max_bytes_bounds_the_payload_and_every_tensor() -> None:
    data = encode({}, {"x": torch.zeros(100)}, None)
    decode(data, max_bytes=len(data))
    with pytest.raises(PayloadError, match=f"has {len(data)} bytes, more than max_bytes={len(data) - 1}; raise it"):
        decode(data, max_bytes=len(data) - 1)
    data = encode({}, {"x": torch.zeros(1).expand(1000, 1000)}, None)
    decode(data, max_bytes=4_000_000)
    with pytest.raises(PayloadError, match="tensor 'x' is 4000000 bytes when expanded, more than max_bytes=3999999"):
        decode(data, max_bytes=3_999_999)


def test_a_reader_that_bounds_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.Reader, "need", lambda self, true, otherwise: None)
    for name in ("past the end", "expanded", "odd offset"):
        with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
            test_crafted_message_is_refused_with_its_reason_and_little_memory(name)
