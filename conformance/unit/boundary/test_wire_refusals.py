"""The wire refuses by name what can't cross, and takes the types that were registered."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ariadne.boundary import nodes, register_boundary_serializer
from ariadne.boundary.nodes import TensorRef, unregister_boundary_serializer
from ariadne.boundary.wire import decode, encode
from ariadne.errors import BoundaryError, PayloadError
from conformance.unit.wire_kit import Angle, check_tensors, check_values, deep, quantized


class Mine(torch.Tensor):
    """A subclass of Tensor."""


Pair = namedtuple("Pair", "a b")


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


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
    check_values(deep(nodes.MAX_DEPTH - 1, lambda v: [v]))
    check_values({deep(nodes.MAX_DEPTH - 2, lambda v: (v,)): None})


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
    words = r"holds a '.*wire_kit\.Angle', which is not registered in this process; call register_boundary_serializer"
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
