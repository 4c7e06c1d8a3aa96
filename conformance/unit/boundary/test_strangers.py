"""What strangers may send, and what little need be sent: types at the door, and views with gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.boundary import nodes
from ariadne.boundary.nodes import TensorRef
from ariadne.boundary.payload import gradients_from_bytes
from ariadne.boundary.ragged import Ragged
from ariadne.boundary.wire import decode, encode
from ariadne.errors import BoundaryError, PayloadError

GOOD = {
    "protocol_version": 2,
    "split_id": "cut:1",
    "plan_signature": "abc",
    "batch": 2,
    "labels": ("x",),
    "requires_grad": (),
}


def message(**changes: Any) -> bytes:
    return encode({**GOOD, **changes}, {"x": torch.zeros(2), "i": torch.zeros(2, dtype=torch.int64)}, (TensorRef("x"),))


def test_a_well_formed_message_is_read() -> None:
    assert BoundaryPayload.from_bytes(message(requires_grad=["x"])).requires_grad == ("x",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": (["x"],)}, r"'labels' must be a list of strings; found \(\['x'\],\)"),
        ({"labels": (1,)}, "'labels' must be a list of strings"),
        ({"labels": (b"x",)}, "'labels' must be a list of strings"),
        ({"labels": "x"}, "'labels' must be a list of strings; found 'x'"),
        ({"labels": None}, "'labels' must be a list of strings; found None"),
        ({"labels": ("x", "x")}, "a name appears twice in the header's 'labels'"),
        ({"labels": ("x", "y")}, "2 label"),
        ({"requires_grad": (["x"],)}, "'requires_grad' must be a list of strings"),
        ({"requires_grad": ((),)}, "'requires_grad' must be a list of strings"),
        ({"requires_grad": 1}, "'requires_grad' must be a list of strings"),
        ({"requires_grad": ("y",)}, "wants a gradient of 'y'"),
        ({"requires_grad": ("i",)}, "wants a gradient of 'i'"),
        ({"requires_grad": ("x", "x")}, "appears twice"),
        ({"batch": True}, "'batch' must be of type int; found True"),
        ({"batch": 2.0}, "'batch' must be of type int"),
        ({"batch": -1}, "batch -1"),
        ({"batch": -(10**5000)}, "batch <int>"),
        ({"split_id": ("cut:1",)}, "'split_id' must be of type str"),
        ({"plan_signature": b"abc"}, "'plan_signature' must be of type str"),
        ({"protocol_version": ("2",)}, "protocol version"),
        ({"on_cpu": "x"}, "'on_cpu' must be a list of strings; found 'x'"),
    ],
)
def test_a_header_of_other_types_is_refused_at_the_door(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        BoundaryPayload.from_bytes(message(**changes))


@pytest.mark.parametrize("names", [(["x"],), (("x", ()),), (1,), (None,), "x", 3, None, ("x", "x")])
def test_gradient_names_of_other_types_are_refused_at_the_door(names: Any) -> None:
    with pytest.raises(PayloadError, match="gradients"):
        gradients_from_bytes(encode({"gradients": names}, {"x": torch.zeros(2)}, None))


def test_a_gradient_that_no_name_stands_for_is_refused() -> None:
    with pytest.raises(PayloadError, match="does not name"):
        gradients_from_bytes(encode({"gradients": ["x"]}, {"x": torch.zeros(2), "y": torch.zeros(2)}, None))


NESTED = ("x", [[1, 2]], [[2, 1]], [0])


@pytest.mark.parametrize(
    "told",
    [
        None,
        (),
        ("x",),
        (1, *NESTED[1:]),
        ("y", *NESTED[1:]),
        ("x", [[1, 2], [1]], [[2, 1], [1]], [0, 0]),
        ("x", [[1, -2]], [[2, 1]], [0]),
        ("x", [[1, 3]], [[2, 1]], [0]),
        ("x", [[1, 2]], [[2, 1]], [1]),
        ("x", [[1, 2]], [[2, 1 << 61]], [0]),
        ("x", [[1 << 61, 1 << 61]], [[1, 1]], [0]),
        ("x", [[1.0, 2]], [[2, 1]], [0]),
        ("x", [[True, 2]], [[2, 1]], [0]),
        ("x", [], [], []),
        ("x", [[1, 2]], [[2, 1]], [0, 0]),
        ("x", "ab", "ab", "ab"),
    ],
)
def test_a_nested_tensor_that_reaches_out_of_its_buffer_is_refused(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    odd, name = Ragged("x", [[1, 2]], [[2, 1]], [0]), "ariadne.boundary.ragged.Ragged"
    monkeypatch.setitem(nodes._registry, name, nodes._registry[name]._replace(encode=lambda value: told))
    with pytest.raises(PayloadError):
        BoundaryPayload.from_bytes(encode(GOOD, {"x": torch.zeros(2)}, (odd,)))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_a_nested_tensor_in_its_buffer_is_read() -> None:
    values = (Ragged("x", [[1, 2], [1, 1]], [[2, 1], [1, 1]], [0, 2]),)
    (found,) = BoundaryPayload.from_bytes(encode(GOOD, {"x": torch.arange(3.0)}, values)).raw
    assert [t.tolist() for t in found.unbind()] == [[[0, 1]], [[2]]]


VIEWS = {
    "the last token": lambda x: x[:, -1],
    "a column": lambda x: x[:, :, 3],
    "every seventh row": lambda x: x[:, ::7],
    "a window, repeated": lambda x: x[:, 5:6].expand(-1, 4, -1),
    "turned": lambda x: x.transpose(0, 2)[::50],
    "overlapping windows": lambda x: x[:, :, :8].unfold(1, 3, 100),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_with_gaps_is_sent_without_them_and_lies_as_it_lay(view: Any) -> None:
    x = torch.randn(4, 500, 200)
    t = view(x)
    data = encode({}, {"t": t}, None)
    found = decode(data)[1]["t"]
    assert torch.equal(found, t)
    assert found.stride() == t.stride()
    assert found.data_ptr() % 64 == t.storage_offset() * 4 % 64
    assert len(data) < t.numel() * 4 + 600


def test_two_views_with_gaps_of_one_memory_share_it_still() -> None:
    x = torch.randn(4, 500, 200)
    data = encode({}, {"a": x[:, 3], "b": x[:, 3:5], "c": x[:, 9].view(torch.int32)}, None)
    found = decode(data)[1]
    assert len(data) < 4 * 4 * 200 * 4 + 900
    assert torch.equal(found["b"], x[:, 3:5])
    found["a"].zero_()
    assert not found["b"][:, 0].any()
    assert torch.equal(found["c"].view(torch.float32), x[:, 9])


def test_a_packed_storage_says_what_it_takes_before_it_is_made() -> None:
    x = torch.zeros(2, 1 << 20)
    with pytest.raises(PayloadError, match=r"its storages take .* more than max_bytes=1000"):
        decode(encode({}, {"x": x[:, 0]}, None), max_bytes=1000)


class Last(nn.Module):
    """Only one token of many goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x)[:, -1])
        return found


def test_a_boundary_that_is_one_token_of_many_costs_one_token() -> None:
    model = Last().eval()
    x = torch.randn(2, 1000, 8)
    runtime = prepare_split(model, (x,), split=SplitSpec("cut:2", dynamic_batch=(1, 8)))
    boundary = runtime.run_prefix(x)
    data = boundary.to_bytes()
    assert len(data) < 1000
    assert torch.equal(runtime.run_suffix(BoundaryPayload.from_bytes(data)), runtime.run_suffix(boundary))


class Counted(nn.Module):
    """Another plan for each number of heads that an input says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for _ in range(bytes(h.shape[0])[0] + h.shape[0]):
            h = h * 2
        found: torch.Tensor = self.b(h)
        return found


def test_a_boundary_whose_plan_was_dropped_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ariadne.runtime.plans.MOST_PLANS", 3)
    runtime = prepare_split(Counted().eval(), (torch.randn(2, 4),), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    first = runtime.run_prefix(torch.randn(5, 4))
    for batch in range(6, 12):
        runtime.run_prefix(torch.randn(batch, 4))
    with pytest.raises(BoundaryError, match=r"whose plan .* was dropped.*more than 3 plans"):
        runtime.run_suffix(first)
    other = prepare_split(Last().eval(), (torch.randn(2, 3, 8),), split="cut:2")
    with pytest.raises(BoundaryError, match="made by another split"):
        runtime.run_suffix(other.run_prefix(torch.randn(2, 3, 8)))
