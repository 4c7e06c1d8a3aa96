"""The wire: what crosses comes back as it was, and no bytes whatever do anything but decode or raise `PayloadError`."""

from __future__ import annotations

import ast
import contextlib
import doctest
import itertools
import math
import random
import struct
import sys
import tracemalloc
import warnings
import zlib
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ariadne.boundary import BoundaryPayload, register_boundary_serializer, wire
from ariadne.boundary.payload import gradients_from_bytes, gradients_to_bytes
from ariadne.boundary.wire import TensorRef, decode, encode, unregister_boundary_serializer
from ariadne.errors import BoundaryError, PayloadError

DTYPES = sorted(wire._TENSOR_DTYPES, key=str)


# What was sent, and what came


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


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(),
    st.text(st.characters(codec=None, exclude_categories=()), max_size=8),
    st.binary(max_size=8),
)
keys = st.recursive(
    scalars.filter(lambda v: v == v), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)
leaves = st.one_of(
    scalars,
    st.complex_numbers(),
    st.sampled_from(sorted(wire._DTYPES.values(), key=str)),
    st.sampled_from(["cpu", "cpu:0", "cuda", "cuda:3", "meta"]).map(torch.device),
    st.lists(st.integers(0, 1 << 62), max_size=4).map(torch.Size),
    st.builds(slice, *[st.one_of(st.none(), st.integers())] * 3),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(trees)
@example([float("nan"), -0.0, math.inf, struct.unpack("<d", struct.pack("<Q", 0x7FF4_0000_DEAD_BEEF))[0]])
@example([1, True, 1.0, 0, -1, 127, 128, -128, -129, 1 << 63, -(1 << 63), 10**5000])
@example({None: 1, True: 2, 3: 4, 2.5: 5, "b": 6, b"b": 7, ("a", (1, None)): 8})
@example([torch.Size([]), (), [], {}, "", b"", "\ud800", slice(None), slice([1], "a", {})])
def test_values_come_back_with_their_types_and_bits(values: Any) -> None:
    check_values(values)


@given(
    st.dictionaries(st.text(max_size=5), st.one_of(scalars, st.lists(scalars, max_size=3), st.tuples(scalars, scalars)))
)
def test_header_comes_back(header: dict[str, Any]) -> None:
    assert same(decode(encode(header, {}, None))[0], header)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits of any dtype, permuted, sliced, expanded, transposed: every layout that views make."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = random.Random(draw(st.integers(0, 1 << 20)))
    raw = torch.tensor(list(generator.randbytes(math.prod(shape) * dtype.itemsize)), dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    t = raw.view(dtype).view(shape)
    for step in draw(st.lists(st.sampled_from("permute slice expand unsqueeze unfold".split()), max_size=4)):
        if step == "unsqueeze":
            t = t.unsqueeze(draw(st.integers(0, t.dim())))
        elif t.dim():
            dim = draw(st.integers(0, t.dim() - 1))
            if step == "permute":
                t = t.movedim(dim, 0)
            elif step == "slice":
                t = t.narrow(dim, *((1, t.shape[dim] - 1) if t.shape[dim] else (0, 0)))
                index = [slice(None)] * t.dim()
                index[dim] = slice(None, None, draw(st.integers(1, 3)))
                t = t[tuple(index)]
            elif step == "expand" and t.shape[dim] == 1:
                t = t.expand([3 if d == dim else n for d, n in enumerate(t.shape)])
            elif step == "unfold" and t.shape[dim] >= 2:
                t = t.unfold(dim, 2, 1)
    return t


@given(tensors())
def test_tensor_of_any_dtype_shape_and_strides_comes_back_bit_for_bit(t: torch.Tensor) -> None:
    check_tensors({"x": t})


@given(tensors(), tensors())
def test_views_that_share_storage_share_it_when_decoded(t: torch.Tensor, other: torch.Tensor) -> None:
    flat = t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0)
    sent = {
        "view": t,
        "other": other,
        "base": flat,
        "part": flat[flat.numel() // 2 :],
        "bytes": flat.view(torch.uint8)[1:],
    }
    check_tensors(sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_crosses_with_all_its_bits(dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat_interleave(2)[1:-15]
    raw = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].clone()
    t = (raw % 2 if dtype == torch.bool else raw).view(dtype)
    check_tensors({"x": t, "one": t[3], "t": t[:4].view(2, 2).t(), "gaps": t[::3], "none": t[:0]})


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        lambda: torch.randn(3, 5).t(),
        lambda: torch.randn(5).expand(4, 5),
        lambda: torch.randn(3, 1, 5).expand(3, 4, 5)[:, :, ::2],
        lambda: torch.randn(4, 10)[:, 3:7],
        lambda: torch.randn(4, 10)[1:, ::3],
        lambda: torch.tensor(3.0),
        lambda: torch.tensor(3.0).expand(2, 2),
        lambda: torch.empty(0, 4),
        lambda: torch.empty(3, 0, 4).transpose(0, 2),
        lambda: torch.empty_strided((0, 2), (1000, 7)),
        lambda: torch.empty(0, 1 << 40),
        lambda: torch.randn(4)[4:],
        lambda: torch.randn(1, 7).as_strided((1, 7), (999, 1)),
        lambda: torch.arange(10.0).unfold(0, 4, 1),
        lambda: torch.arange(20.0).as_strided((3, 3), (2, 2)),
        lambda: torch.arange(9.0).as_strided((3, 3), (2, 2)),  # as many elements as memory, yet with gaps
        lambda: torch.randn(1, 1, 2, 1),
        lambda: torch.randn([1] * 64),
        lambda: torch.nn.Parameter(torch.randn(3)),
        lambda: torch.nn.Buffer(torch.randn(3)),
        lambda: torch.randn(3, requires_grad=True) * 2,
    ],
)
def test_layout_comes_back(make: Callable[[], torch.Tensor]) -> None:
    check_tensors({"x": make()})


def test_a_write_into_one_is_seen_in_the_other() -> None:
    base = torch.zeros(4, 6)
    sent = {"view": base[1:3, ::2], "base": base, "row": base[2], "ints": base.view(torch.int32)}
    _, came, _ = decode(encode({}, sent, None))
    came["view"].fill_(1.0)
    assert came["base"].sum() == 6
    assert came["row"].tolist() == [1, 0, 1, 0, 1, 0]
    assert came["ints"][1, 0].item() == 0x3F80_0000
    came["base"].zero_()
    assert came["view"].abs().sum() == 0


def test_autograd_notices_a_write_through_another_view() -> None:
    """As in one process: to overwrite what backward needs, through the base, is an error and no wrong gradient."""
    base = torch.ones(4)
    _, came, _ = decode(encode({}, {"view": base[1:3], "base": base}, None))
    weight = torch.ones(2, requires_grad=True)
    loss = (came["view"] * weight).sum()
    came["base"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bytes_are_sent_once_and_only_those_that_tensors_reach() -> None:
    base = torch.arange(100_000, dtype=torch.float32)
    alone = len(encode({}, {"a": base}, None))
    assert len(encode({}, {"a": base, "b": base[10:], "c": base.view(100, 1000).t(), "d": base}, None)) < alone + 1000
    assert len(encode({}, {"a": base[:10]}, None)) < 1000
    assert len(encode({}, {"a": base[-10:]}, None)) < 1000
    assert len(encode({}, {"a": base[:1].expand(100_000)}, None)) < 1000


def test_what_lies_between_the_elements_stays_at_home() -> None:
    secret = torch.full((8, 64), 0x5A, dtype=torch.uint8)
    secret[:, 5] = 1
    for sent in ({"x": secret[:, 5]}, {"x": secret[:4, 5], "y": secret[4:, 5]}, {"x": secret[0:1, 5:6].expand(3, 3)}):
        assert b"\x5a\x5a" not in encode({}, sent, None)
    narrow = torch.full((2, 64), 0x5A, dtype=torch.uint8)
    narrow[:, :60] = 1  # too few bytes between the rows to send them without
    assert b"\x5a\x5a" not in encode({}, {"x": narrow[:, :60]}, None)


@pytest.mark.parametrize("offset", range(1, 20))
def test_a_matrix_product_has_the_same_bits_after_the_wire(offset: int) -> None:
    """BLAS chooses its way by the address modulo 64: decoded at another place, `mv` would differ in the last bits."""
    torch.manual_seed(offset)
    x = torch.randn(16 * 97 + 64)[offset : offset + 16 * 97].view(16, 97)
    w = torch.randn(97, 5)
    _, came, _ = decode(encode({}, {"x": x}, None))
    for f in (lambda x: x @ w, lambda x: x @ w[:, 0], lambda x: x.flatten() @ x.flatten()):
        assert bits(f(came["x"])) == bits(f(x))


def test_conjugate_and_negative_bits_are_resolved() -> None:
    c = torch.randn(3, dtype=torch.complex64)
    _, came, _ = decode(encode({}, {"conj": c.conj(), "neg": c.conj().imag}, None))
    assert not came["conj"].is_conj()
    assert not came["neg"].is_neg()
    assert torch.equal(came["conj"], torch.complex(c.real, -c.imag))
    assert torch.equal(came["neg"], -c.imag)


def test_decoded_tensors_can_be_trained_even_when_decoded_in_inference_mode() -> None:
    with torch.inference_mode():
        _, came, _ = decode(encode({}, {"x": torch.randn(3)}, None))
    x = came["x"].requires_grad_()
    (x * x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_default_device_and_dtype_do_not_matter() -> None:
    x = torch.randn(2, 3)
    with torch.device("meta"):
        _, came, _ = decode(encode({}, {"x": x, "gaps": x[:, 1:]}, None))
    assert torch.equal(came["x"], x)
    assert torch.equal(came["gaps"], x[:, 1:])


def test_labels_and_references_keep_their_names_and_order() -> None:
    sent = {label: torch.tensor(float(i)) for i, label in enumerate(["z", "", "a['b']", "\ud800é"])}
    _, came, values = decode(encode({}, sent, {"all": [TensorRef(label) for label in sent]}))
    assert list(came) == list(sent)
    assert values == {"all": [TensorRef(label) for label in sent]}


def test_any_buffer_of_bytes_decodes() -> None:
    data = encode({"a": 1}, {"x": torch.arange(3)}, [1])
    for form in (data, bytearray(data), memoryview(data), memoryview(b"__" + data)[2:]):
        assert decode(form)[1]["x"].tolist() == [0, 1, 2]


def test_boundaries_and_gradients_arrive_on_the_device_that_was_asked_for() -> None:
    gradients = gradients_from_bytes(gradients_to_bytes({"x": torch.ones(3), "y": None}), device="meta")
    assert gradients["y"] is None
    assert gradients["x"] is not None
    assert gradients["x"].device.type == "meta"
    boundary = BoundaryPayload("cut:1", "0" * 16, 1, ("x",), (torch.ones(1, 3),))
    assert BoundaryPayload.from_bytes(boundary.to_bytes(), device="meta").tensors["x"].device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_give_the_bytes_of_cpu_tensors_and_decode_to_cuda() -> None:
    base = torch.randn(4, 6, 3)
    sent = {"view": base[1:3, ::2], "base": base, "t": base.transpose(0, 2), "gaps": torch.randn(5, 5)[1:, 2:4]}
    sent |= {
        "wide": torch.randn(3).expand(2, 3),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn)[:, 1:],
        "none": base[:0],
    }
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in sent.values()}
    copies = {at: torch.empty(0, dtype=torch.uint8).set_(s).cuda() for at, s in storages.items()}
    on_cuda = {
        label: torch.empty(0, dtype=t.dtype, device="cuda").set_(
            copies[t.untyped_storage().data_ptr()].untyped_storage(), t.storage_offset(), t.shape, t.stride()
        )
        for label, t in sent.items()
    }
    data = encode({}, sent, None)
    assert encode({}, on_cuda, None) == data
    _, came, _ = decode(data, device="cuda")
    for label, t in sent.items():
        assert came[label].device.type == "cuda"
        assert came[label].stride() == t.stride()
        assert bits(came[label].cpu()) == bits(t)
    came["view"].fill_(7.0)
    assert (came["base"][1:3, ::2] == 7.0).all()


# What can't cross


class Angle:
    """A type of the user's own."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return type(other) is Angle and other.degrees == self.degrees

    __hash__ = None  # type: ignore[assignment]


class Mine(torch.Tensor):
    """A subclass of Tensor."""


Pair = namedtuple("Pair", "a b")


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


def freed() -> torch.Tensor:
    t = torch.zeros(8)
    t.untyped_storage().resize_(4)
    return t


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(2, device="meta"), "tensor 'x': it is on the meta device and has no data"),
        (lambda: torch.eye(2).to_sparse(), "sparse or nested; make it dense before the split"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse or nested"),
        (nested, "sparse or nested"),
        (quantized, "its dtype is torch.qint8; convert to one of .*float32"),
        (lambda: torch.zeros(2).as_subclass(Mine), r"plain torch.Tensor, found .* and .*Mine"),
        (lambda: 3.0, "plain torch.Tensor, found .* and builtins.float"),
        (lambda: torch.zeros([1] * 65), "it has 65 dims, .* at most 64 dims cross"),
        (lambda: torch._efficientzerotensor((2,)), "invalid python storage"),
        (freed, "its storage was resized to 4 bytes"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_without_plain_memory_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(BoundaryError, match=words):
        encode({}, {"x": make()}, None)


def test_a_tensor_inside_vmap_is_refused() -> None:
    with pytest.raises(BoundaryError, match="cannot encode tensor 'x': Cannot access storage"):
        torch.vmap(lambda x: encode({}, {"x": x}, None))(torch.zeros(2, 3))


def test_memory_shared_by_two_storages_is_refused() -> None:
    raw = bytearray(64)
    one, two = (torch.frombuffer(raw, dtype=torch.float32, offset=offset) for offset in (0, 8))
    with pytest.raises(BoundaryError, match=r"tensors 'a' and 'b': .* two torch storages .* clone one"):
        encode({}, {"a": one, "b": two}, None)
    encode({}, {"a": one[:2], "b": two}, None)
    check_tensors({"a": one, "b": torch.frombuffer(raw, dtype=torch.int32)})


def cycle() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def bomb() -> list[Any]:
    value: list[Any] = []
    for _ in range(30):
        value = [value, value]
    return value


def deep(n: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = None
    for _ in range(n):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, Angle(1.0)]}, r"cannot encode values\['a'\]\[1\]: it is a .*Angle, which has no form on the wire; "
                                r"call register_boundary_serializer\(Angle, encode, decode, schema\)"),
        (Pair(1, 2), "values: it is a .*Pair, which has no form"),
        (object, "it is a builtins.type"),
        ({1, 2}, "it is a builtins.set"),
        ([torch.zeros(2)], r"values\[0\]: it is a tensor; put it into tensors"),
        ([TensorRef("y")], r"values\[0\]: no tensor has the label 'y'; add it to tensors"),
        (cycle(), "more than 64 levels or 1048576 values; break cycles"),
        (bomb(), "more than 64 levels or 1048576 values"),
        (deep(5000, lambda v: [v]), "more than 64 levels"),
        (deep(64, lambda v: (v,)), "more than 64 levels"),
        ({frozenset(): 1}, "builtins.frozenset"),
        ({torch.float32: 1}, "a dict key on the wire is a str, a number, or a tuple of such"),
        ({(1, torch.Size([1])): 1}, "a dict key on the wire"),
    ],
    ids=lambda v: "" if isinstance(v, str) else type(v).__name__,
)  # fmt: skip
def test_values_without_a_form_are_refused(value: Any, words: str) -> None:
    with pytest.raises(BoundaryError, match=words):
        encode({}, {}, value)


@pytest.mark.parametrize(
    "header",
    [{"a": {}}, {"a": 1j}, {1: 2}, {"a": (1, [slice(None)])}, {"a": torch.float32}, {"a": TensorRef("x")}],
    ids=str,
)
def test_header_is_flat_and_plain(header: dict[Any, Any]) -> None:
    with pytest.raises(BoundaryError, match="cannot encode header"):
        encode(header, {"x": torch.zeros(1)}, None)


def test_the_deepest_value_that_encodes_also_decodes() -> None:
    check_values(deep(wire.MAX_DEPTH - 1, lambda v: [v]))
    check_values({deep(wire.MAX_DEPTH - 2, lambda v: (v,)): None})


# Registered types


@pytest.fixture
def angle() -> Iterator[None]:
    register_boundary_serializer(
        Angle, lambda a: {"degrees": a.degrees}, lambda tree: Angle(tree["degrees"]), "degrees, v1"
    )
    yield
    unregister_boundary_serializer(Angle)


@pytest.mark.usefixtures("angle")
def test_registered_types_cross() -> None:
    assert decode(encode({}, {}, [Angle(1.5), {"a": (Angle(-1.0),)}]))[2] == [Angle(1.5), {"a": (Angle(-1.0),)}]


@pytest.mark.usefixtures("angle")
def test_registered_types_nest_and_refer_to_tensors() -> None:
    register_boundary_serializer(Pair, list, lambda tree: Pair(*tree), {"fields": ["a", "b"]})
    try:
        sent = Pair(Angle(2.0), Pair(TensorRef("x"), None))
        assert decode(encode({}, {"x": torch.zeros(1)}, sent))[2] == sent
    finally:
        unregister_boundary_serializer(Pair)


@pytest.mark.usefixtures("angle")
def test_registering_again_replaces() -> None:
    register_boundary_serializer(Angle, lambda a: a.degrees + 1, Angle, "degrees, v1")
    assert decode(encode({}, {}, Angle(1.0)))[2] == Angle(2.0)


def test_unknown_type_is_refused_by_name(angle: None) -> None:
    data = encode({}, {}, [Angle(1.0)])
    unregister_boundary_serializer(Angle)
    words = r"holds a '.*test_wire\.Angle', which is not registered in this process; call register_boundary_serializer"
    with pytest.raises(PayloadError, match=words):
        decode(data)


@pytest.mark.usefixtures("angle")
def test_another_schema_is_refused() -> None:
    data = encode({}, {}, [Angle(1.0)])
    register_boundary_serializer(Angle, lambda a: a.degrees, Angle, {"unit": "radians"})
    with pytest.raises(PayloadError, match=r"Angle of schema .*degrees, v1.*, this process expects .*radians"):
        decode(data)


def test_schema_does_not_depend_on_the_order_of_its_keys(angle: None) -> None:
    register_boundary_serializer(Angle, lambda a: a.degrees, Angle, {"a": 1, "b": 2})
    data = encode({}, {}, Angle(1.0))
    register_boundary_serializer(Angle, lambda a: a.degrees, Angle, {"b": 2, "a": 1})
    assert decode(data)[2] == Angle(1.0)


def test_failing_serializers_are_named(angle: None) -> None:
    data = encode({}, {}, Angle(1.0))
    register_boundary_serializer(Angle, lambda a: a.radians, lambda tree: tree["radians"], "degrees, v1")
    with pytest.raises(BoundaryError, match=r"values\[0\]: the encoder registered for .*Angle failed: AttributeError"):
        encode({}, {}, [Angle(1.0)])
    with pytest.raises(PayloadError, match=r"the decoder registered for .*Angle refused what it was sent: KeyError"):
        decode(data)
    register_boundary_serializer(Angle, lambda a: [a], Angle, "degrees, v1")
    with pytest.raises(BoundaryError, match="more than 64 levels"):
        encode({}, {}, Angle(1.0))


@pytest.mark.parametrize(
    "type_", [int, list, dict, torch.Tensor, torch.nn.Parameter, torch.Size, TensorRef, type(None)]
)
def test_types_that_cross_by_themselves_are_not_registered(type_: type) -> None:
    with pytest.raises(BoundaryError, match=r"cannot register .*: values cross by themselves, tensors by their label"):
        register_boundary_serializer(type_, list, list)


def test_a_subclass_of_a_registered_type_is_not_taken_for_it(angle: None) -> None:
    with pytest.raises(BoundaryError, match=r"it is a .*Right, which has no form"):
        encode({}, {}, type("Right", (Angle,), {})(90.0))
    with pytest.raises(BoundaryError, match=r"it is a .*Angle, which has no form"):
        encode({}, {}, type("Angle", (), {"__module__": __name__})())


# Bytes from a stranger


def sealed(body: bytes) -> bytes:
    """A message around this body, its checksum and length right, so that the parser proper must find what is wrong."""
    return wire._PREFIX.pack(wire._MAGIC, wire.VERSION, wire._ORDER, zlib.crc32(body), len(body)) + body


def section(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def node(value: Any, labels: Any = ()) -> bytes:
    writer = wire._Writer(labels)
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
    monkeypatch.setattr(wire, "MAX_NODES", 100)
    with pytest.raises(PayloadError, match="more than 64 levels or 100 values"):
        decode(data)


def test_depth_does_not_depend_on_how_deep_the_caller_is() -> None:
    data = encode({}, {}, deep(wire.MAX_DEPTH - 1, lambda v: [v]))

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


# The module itself


def test_wire_imports_nothing_that_could_run_what_it_reads() -> None:
    text = ast.parse(Path(wire.__file__).read_text())
    imports = {a.name for n in ast.walk(text) if isinstance(n, ast.Import) for a in n.names}
    imports |= {n.module for n in ast.walk(text) if isinstance(n, ast.ImportFrom)}
    allowed = "__future__ collections.abc ctypes itertools json math re struct sys typing zlib torch"
    assert imports == {*allowed.split(), "ariadne.errors"}
    names = {n.id for n in ast.walk(text) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(text) if isinstance(n, ast.Attribute)
    }
    assert not names & {
        "eval",
        "exec",
        "compile",
        "__import__",
        "getattr",
        "globals",
        "load",
        "loads",
        "modules",
        "import_module",
    }


def test_docstrings_are_true() -> None:
    tested = doctest.testmod(wire)
    assert tested.attempted > 5
    assert not tested.failed


# The tests bite: each of these bugs, planted, fails a check above


def plant_contiguous(patch: pytest.MonkeyPatch) -> None:
    place = wire._place
    patch.setattr(wire, "_place", lambda *args: place(*args).contiguous())


def plant_copies(patch: pytest.MonkeyPatch) -> None:
    place = wire._place
    patch.setattr(wire, "_place", lambda *args: place(*args).clone())


def plant_shift(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wire, "_ALIGN", 1)


def plant_dense(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wire, "_is_dense", lambda shape, strides: True)


def plant_unwritten(patch: pytest.MonkeyPatch) -> None:
    memory, empty = wire._memory, torch.empty
    patch.setattr(wire, "_memory", lambda raw: memoryview(bytearray(memory(raw))))
    # New memory may by chance hold what should have been written.
    patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(85))


def plant_float(patch: pytest.MonkeyPatch) -> None:
    tag, _, read = wire._LEAVES[float]
    patch.setitem(wire._LEAVES, float, (tag, lambda v: struct.pack("<d", v + 0.0 if v == v else math.nan), read))


def plant_sorted(patch: pytest.MonkeyPatch) -> None:
    tag, _, read = wire._BRANCHES[dict]
    patch.setitem(wire._BRANCHES, dict, (tag, lambda v: [x for k in sorted(v) for x in (k, v[k])], read))


def plant_unbounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wire._Reader, "need", lambda self, true, otherwise: None)


def run_layouts() -> None:
    base = torch.arange(40.0).view(5, 8)
    check_tensors({"base": base, "view": base[1:, 2:].t()})
    check_tensors({"x": torch.arange(40.0)[3:]})


def run_gaps() -> None:
    test_what_lies_between_the_elements_stays_at_home()


def run_values() -> None:
    check_values({"b": -0.0, "a": struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0]})


def run_bombs() -> None:
    for name in ("past the end", "expanded", "odd offset"):
        test_crafted_message_is_refused_with_its_reason_and_little_memory(name)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (plant_contiguous, run_layouts),
        (plant_copies, run_layouts),
        (plant_shift, run_layouts),
        (plant_unwritten, run_layouts),
        (plant_dense, run_gaps),
        (plant_float, run_values),
        (plant_sorted, run_values),
        (plant_unbounded, run_bombs),
    ],
    ids=lambda f: f.__name__,
)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        check()
