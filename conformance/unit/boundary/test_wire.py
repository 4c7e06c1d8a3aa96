"""The wire: what crosses comes back as it was, bit for bit."""

from __future__ import annotations

import ast
import doctest
import math
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ariadne.boundary import BoundaryPayload, nodes, sections, wire
from ariadne.boundary.nodes import TensorRef
from ariadne.boundary.payload import gradients_from_bytes, gradients_to_bytes
from ariadne.boundary.wire import decode, encode
from conformance.unit.wire_kit import bits, check_tensors, check_values, same

DTYPES = sorted(wire._TENSOR_DTYPES, key=str)


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
    st.sampled_from(sorted(nodes.DTYPES.values(), key=str)),
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


def test_tensors_that_lie_alone_are_written_as_any_others() -> None:
    base = torch.arange(48.0).view(2, 3, 2, 4)
    lone: list[Mapping[str, torch.Tensor]] = [
        {"a": base, "b": torch.randint(0, 9, (3,))},
        {"a": base.permute(0, 3, 1, 2), "b": torch.ones(()).expand(4, 5)},
        {"a": torch.arange(40.0)[3:], "b": torch.nn.Parameter(torch.ones(2).bfloat16())},
    ]
    others: list[Mapping[str, torch.Tensor]] = [
        {"a": base, "b": base[1]},
        {"a": base[0], "b": base[1]},
        {"a": base[:, ::2]},
        {"a": torch.ones(2, dtype=torch.complex64).conj()},
        {"a": torch.empty(0, 3)},
    ]
    for tensors in lone:
        assert encode({}, tensors, None) == written(tensors)
    assert all(wire._alone(tensors) is None for tensors in others)


def written(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """What is written of tensors by the way that takes any."""
    assert wire._alone(tensors) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_alone", lambda _: None)
        return encode({}, tensors, None)


# The module itself


@pytest.mark.parametrize("module", [nodes, sections, wire])
def test_wire_imports_nothing_that_could_run_what_it_reads(module: ModuleType) -> None:
    text = ast.parse(Path(str(module.__file__)).read_text())
    imports = {a.name for n in ast.walk(text) if isinstance(n, ast.Import) for a in n.names}
    imports |= {str(n.module) for n in ast.walk(text) if isinstance(n, ast.ImportFrom)}
    allowed = "__future__ collections.abc ctypes itertools json math re struct sys typing zlib torch"
    assert imports <= {*allowed.split(), "ariadne.errors", "ariadne.boundary.nodes", "ariadne.boundary.sections"}
    names = {n.id for n in ast.walk(text) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(text) if isinstance(n, ast.Attribute)}
    runs = "eval exec compile __import__ getattr globals load loads modules import_module"
    assert not names & {*runs.split()}


@pytest.mark.parametrize(("module", "examples"), [(nodes, 5), (wire, 5)])
def test_docstrings_are_true(module: ModuleType, examples: int) -> None:
    tested = doctest.testmod(module)
    assert tested.attempted >= examples
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
    patch.setattr(wire, "_DENSE", sections.Memo())


def plant_unwritten(patch: pytest.MonkeyPatch) -> None:
    memory, empty, strided = wire._bytes_at, torch.empty, torch.empty_strided
    patch.setattr(wire, "_bytes_at", lambda address, n: memoryview(bytearray(memory(address, n))))
    # New memory may by chance hold what should have been written.
    patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(85))
    patch.setattr(torch, "empty_strided", lambda *args, **kwargs: strided(*args, **kwargs).fill_(85))


def plant_apart(patch: pytest.MonkeyPatch) -> None:
    alone = wire._alone
    patch.setattr(wire, "_alone", lambda tensors: alone({label: t.clone() for label, t in tensors.items()}))


def plant_float(patch: pytest.MonkeyPatch) -> None:
    tag, _, read = nodes._LEAVES[float]
    patch.setitem(nodes._LEAVES, float, (tag, lambda v: struct.pack("<d", v + 0.0 if v == v else math.nan), read))


def plant_sorted(patch: pytest.MonkeyPatch) -> None:
    tag, _, read = nodes._BRANCHES[dict]
    patch.setitem(nodes._BRANCHES, dict, (tag, lambda v: [x for k in sorted(v) for x in (k, v[k])], read))


def run_layouts() -> None:
    base = torch.arange(40.0).view(5, 8)
    check_tensors({"base": base, "view": base[1:, 2:].t()})
    check_tensors({"x": torch.arange(40.0)[3:]})


def run_gaps() -> None:
    test_what_lies_between_the_elements_stays_at_home()


def run_values() -> None:
    check_values({"b": -0.0, "a": struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0]})


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (plant_contiguous, run_layouts),
        (plant_copies, run_layouts),
        (plant_shift, run_layouts),
        (plant_unwritten, run_layouts),
        (plant_apart, run_layouts),
        (plant_dense, run_gaps),
        (plant_float, run_values),
        (plant_sorted, run_values),
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
