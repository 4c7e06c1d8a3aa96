"""Quantized linear layers in files: their packed weights as plain tensors, packed anew, and what of them is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne.errors import BoundaryError, HalfError
from ariadne.halves.packed import parts_of
from conformance.suite.halves_fuzz import Quantized, closed, opened

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # which torch is to drop in time
prepack = torch.ops.quantized.linear_prepack


def integers(rows: int, columns: int, channels: bool = False, axis: int = 0) -> Tensor:
    weight = torch.randn(rows, columns)
    if not channels:
        return torch.quantize_per_tensor(weight, 0.017, 3, torch.qint8)
    count = weight.shape[axis]
    return torch.quantize_per_channel(
        weight, torch.rand(count).double() / 50 + 0.01, torch.arange(count), axis, torch.qint8
    )


class Held(nn.Module):
    """A layer whose packed weights an attribute holds, called twice; a plain one behind it."""

    def __init__(self, packed: Any, op: Any = torch.ops.quantized.linear_dynamic) -> None:
        super().__init__()
        self.packed, self.op, self.leave = packed, op, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.op(self.op(x, self.packed), self.packed).tanh())
        return found


class Static(nn.Module):
    """Integers go in and come out of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = prepack(integers(8, 8, channels=True), torch.randn(8))
        self.act, self.leave = nn.Tanh(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.quantize_per_tensor(x, 0.05, 60, torch.quint8)
        found: Tensor = self.leave(self.act(torch.ops.quantized.linear_relu(q, self.packed, 0.1, 10).dequantize()))
        return found


def _fp16() -> Held:
    return Held(
        torch.ops.quantized.linear_prepack_fp16(torch.randn(8, 8), torch.randn(8)),
        torch.ops.quantized.linear_dynamic_fp16,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one scale": lambda: Held(prepack(integers(8, 8), torch.randn(8))),
    "a scale for each output": lambda: Held(prepack(integers(8, 8, channels=True), torch.randn(8))),
    "no bias": lambda: Held(prepack(integers(8, 8), None)),
    "half precision": _fp16,
    "static": Static,
    "torch's own module": Quantized,
}


def saved(folder: Path, model: nn.Module, **options: Any) -> tuple[Path, Path]:
    runtime = ariadne.prepare_split(model.eval(), (X[:2],), split="after:act" if isinstance(model, Static) else "50%")
    folder.mkdir(exist_ok=True)
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side, **options)
    return folder / "prefix", folder / "suffix"


def run(prefix: Any, suffix: Any) -> Any:
    return suffix.run_suffix(ariadne.BoundaryPayload.from_bytes(prefix.run_prefix(X).to_bytes()))


@pytest.mark.parametrize("name", MODELS)
def test_halves_give_what_the_model_gives(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    prefix, suffix = map(ariadne.load, saved(tmp_path, model))
    with torch.no_grad():
        expected = model(X)
        assert torch.equal(run(prefix, suffix), expected)
        assert torch.equal(run(copy.deepcopy(prefix), suffix), expected)
        prefix.save(tmp_path / "again")
        again = ariadne.load(tmp_path / "again")
        assert torch.equal(run(again, suffix), expected)
    assert again.digest == prefix.digest == suffix.digest != ""


def test_each_is_in_the_file_once_and_as_plain_tensors(tmp_path: Path) -> None:
    header, half, _ = opened(saved(tmp_path, MODELS["a scale for each output"]())[0].read_bytes())
    found = {key: (header[key]["dtype"], header[key]["shape"]) for key in header if key.startswith("packed")}
    assert found == {
        "packed 0 weight": ("I8", [8, 8]),
        "packed 0 scale": ("F64", [8]),
        "packed 0 zero_point": ("I64", [8]),
        "packed 0 bias": ("F32", [8]),
    }
    assert all(o[0] == "packed" for o in half["plans"][0]["objects"].values())


def _row(half: dict[str, Any], part: int) -> list[Any]:
    """Where a part of the packed weights lies: the weight, scale, zero point, bias."""
    found: list[Any] = _parts(half)[part]
    return found


def _parts(half: dict[str, Any]) -> list[Any]:
    found: list[Any] = next(iter(half["plans"][0]["objects"].values()))[2]
    return found


def _gone(*parts: int) -> Callable[[Any], None]:
    def change(half: Any) -> None:
        for part in parts:
            _parts(half)[part] = None

    return change


def _put(part: int, at: int, value: Any) -> Callable[[Any], None]:
    return lambda half: _row(half, part).__setitem__(at, value)


def _engine(name: str) -> Callable[[Any], None]:
    return lambda half: next(iter(half["plans"][0]["objects"].values())).__setitem__(1, name)


def _twice(half: Any) -> None:
    objects = half["plans"][0]["objects"]
    first = next(iter(objects))
    value = next(v for v in half["plans"][0]["values"] if v[0] == first)
    half["plans"][0]["values"].append(["other", *value[1:]])
    objects["other"] = copy.deepcopy(objects[first])
    objects["other"][2][3] = None


def _generator(half: Any) -> None:
    objects = half["plans"][0]["objects"]
    state = bytes(torch.Generator().get_state().tolist()).hex()
    objects[next(iter(objects))] = ["generator", "cpu", [state[i : i + 4096] for i in range(0, len(state), 4096)]]


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "no weight": (_gone(0), "no weight of two dims"),
    "no scale": (_gone(1), "lacks its scale"),
    "no scale and no zero point": (_gone(1, 2), "lacks its scale"),
    "no zero point": (_gone(2), "lacks its scale"),
    "floats with a scale": (_put(0, 1, "torch.float32"), "lacks its scale"),
    "another dtype": (_put(0, 1, "torch.int64"), "a packed weight is of torch.int64"),
    "another dtype of the scale": (_put(1, 1, "torch.float32"), "of another dtype"),
    "another dtype of the bias": (_put(3, 1, "torch.float64"), "does not fit"),
    "one dim": (lambda half: _row(half, 0).__setitem__(slice(2, 4), [[64], [1]]), "no weight of two dims"),
    "more rows than the file has": (lambda half: [f(half) for f in _larger], "does not hold what lies in it"),
    "more than any memory": (lambda half: [f(half) for f in _endless], "does not hold what lies in it"),
    "fewer scales": (_put(1, 2, [7]), "not one scale for each output"),
    "a shorter bias": (_put(3, 2, [7]), "does not fit"),
    "rows in one place": (_put(0, 3, [0, 1]), "have gaps"),
    "a part of another tensor": (_put(0, 0, "leave.weight"), "has no tensor|does not hold"),
    "no such engine": (_engine("none"), "malformed"),
    "too few parts": (lambda half: _parts(half).pop(), "malformed"),
    "two of one weight": (_twice, "packed twice"),
    "a generator in its place": (_generator, "is not a __torch__"),
}
_endless = (_put(0, 2, [2**47, 2**47]), _put(0, 3, [2**47, 1]), *(_put(i, 2, [2**47]) for i in (1, 2, 3)))
_larger = (_put(0, 2, [2**20, 8]), *(_put(i, 2, [2**20]) for i in (1, 2, 3)))


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_of_them_is_refused(tmp_path: Path, lie: str) -> None:
    path, _ = saved(tmp_path, MODELS["a scale for each output"]())
    change, says = LIES[lie]
    header, half, body = opened(path.read_bytes())
    change(half)
    path.write_bytes(closed(header, half, body))
    with pytest.raises(HalfError, match=says):
        ariadne.load(path)


@pytest.mark.parametrize(
    ("part", "value"), [("scale", 0.0), ("scale", float("nan")), ("scale", -1.0), ("zero_point", 200)]
)
def test_scales_and_zero_points_that_are_none_are_refused(tmp_path: Path, part: str, value: float) -> None:
    path, _ = saved(tmp_path, MODELS["one scale"]())
    header, half, body = opened(path.read_bytes())
    begin, end = header[f"packed 0 {part}"]["data_offsets"]
    number = torch.tensor(value, dtype=torch.int64 if part == "zero_point" else torch.float64)
    body = body[:begin] + number.numpy().tobytes() + body[end:]
    path.write_bytes(closed(header, half, body))
    with pytest.raises(HalfError, match="of a packed weight is none"):
        ariadne.load(path)


def test_other_ops_of_that_library_want_leave(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, MODELS["one scale"]())
    header, half, body = opened(path.read_bytes())
    half["ops"]["quantized.add.default"] = str(torch.ops.quantized.add.default._schema)
    path.write_bytes(closed(header, half, body))
    with pytest.raises(HalfError, match=r"allow=\['quantized::\*'\]"):
        ariadne.load(path)


def test_convolutions_are_refused_by_name(tmp_path: Path) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.quantize_per_tensor(torch.randn(4, 1, 3, 3), 0.02, 0, torch.qint8)
            self.packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], [1, 1], [1, 1], 1)

        def forward(self, x: Tensor) -> Tensor:
            q = torch.quantize_per_tensor(x[:, None, None], 0.05, 60, torch.quint8)
            return torch.ops.quantized.conv2d(q, self.packed, 0.1, 10).dequantize().tanh()

    with pytest.raises(
        HalfError, match=r"quantized.conv2d.*which a file may not name: it takes a .*Conv2dPackedParamsBase"
    ):
        saved(tmp_path, Convolved())


def test_integers_of_a_scheme_that_a_file_cannot_hold_are_refused() -> None:
    with pytest.raises(HalfError, match="by one scale, or by one for each output"):
        parts_of((integers(8, 8, channels=True, axis=1), None))


@contextmanager
def engine(name: str) -> Iterator[None]:
    was = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = was


@pytest.mark.skipif("qnnpack" not in torch.backends.quantized.supported_engines, reason="there is one engine here")
def test_another_engine_is_refused_where_it_is_loaded(tmp_path: Path) -> None:
    with engine("qnnpack"):
        torch.manual_seed(0)
        model = MODELS["one scale"]()
        prefix, suffix = saved(tmp_path, model)
        with torch.no_grad():
            assert torch.equal(run(ariadne.load(prefix), ariadne.load(suffix)), model(X))
    with pytest.raises(HalfError, match=r"Set torch.backends.quantized.engine = 'qnnpack'"):
        ariadne.load(prefix)
    with pytest.raises(HalfError, match="computes otherwise when it is packed by the engine"):
        saved(tmp_path, model)


def test_other_packed_weights_have_another_digest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = Quantized(), Quantized()
    two.leave = one.leave
    files = [saved(tmp_path / name, model) for name, model in (("one", one), ("two", two))]
    prefix, suffix = ariadne.load(files[0][0]), ariadne.load(files[1][1])
    with pytest.raises(BoundaryError, match="other weights"):
        run(prefix, suffix)


def test_weights_given_anew_have_the_same_packed_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = Quantized(), Quantized()
    files, others = saved(tmp_path / "one", one), saved(tmp_path / "two", two)
    prefix, suffix = map(ariadne.load, files)
    known = prefix.digest
    for half in (prefix, suffix, ariadne.load(files[0], weights=one.state_dict())):
        half.replace_weights(one.state_dict())
        assert half.digest == known
    for refused in (prefix.replace_weights, lambda given: ariadne.load(files[0], weights=given)):
        with pytest.raises(HalfError, match=r"'enter\._packed_params\._packed_params' is the packed weight"):
            refused(two.state_dict())
    suffix.replace_weights(two.state_dict())  # which has none of them
    with torch.no_grad():
        assert torch.equal(run(ariadne.load(others[0]), suffix), two(X))
    suffix.replace_weights({n: t for n, t in one.state_dict().items() if "packed" not in n})
    assert suffix.digest == ""


def test_they_are_not_left_out_and_not_moved(tmp_path: Path) -> None:
    with pytest.raises(HalfError, match="save this half with its weights"):
        saved(tmp_path, MODELS["one scale"](), weights=False)
    prefix, _ = map(ariadne.load, saved(tmp_path, MODELS["one scale"]()))
    prefix.register_parameter("p", nn.Parameter(torch.zeros(1)))
    with pytest.raises(HalfError, match=r"packed weights, which no .to\(\)"):
        prefix.double()
