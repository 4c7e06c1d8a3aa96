"""A boundary of two devices: what was on the CPU is on the CPU again, wherever the rest is read; meta stands in for a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ariadne import BoundaryPayload
from ariadne.boundary import payload
from ariadne.boundary.payload import gradients_from_bytes, gradients_to_bytes
from ariadne.boundary.wire import on_the_cpu

HERE, THERE = torch.arange(3), torch.empty(3, device="meta")


def devices(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {label: t.device.type for label, t in tensors.items()}


def test_only_a_boundary_of_two_devices_says_what_is_on_the_cpu() -> None:
    assert on_the_cpu({"x": THERE, "i": HERE}) == ("i",)
    assert on_the_cpu({"x": HERE, "i": HERE}) == on_the_cpu({"x": THERE}) == on_the_cpu({}) == ()


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors called "x" count as those of another device; their data are on the CPU, since there are none on meta."""
    monkeypatch.setattr(payload, "on_the_cpu", lambda held: tuple(label for label in held if not label.startswith("x")))


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared storages"])
def test_what_was_on_the_cpu_stays_there(shared: bool) -> None:
    x, i = torch.rand(4), torch.arange(4)
    held = {"x": x, "x2": x[1:], "i": i, "i2": i[1:]} if shared else {"x": x, "i": i}
    sent = BoundaryPayload.from_tensors(held, split_id="cut:1", plan_signature="abc", batch=4).to_bytes()
    read = BoundaryPayload.from_bytes(sent, device="meta").tensors
    assert devices(read) == {label: "meta" if label.startswith("x") else "cpu" for label in held}
    assert torch.equal(read["i"], i)
    assert devices(BoundaryPayload.from_bytes(sent).tensors) == dict.fromkeys(held, "cpu")


@pytest.mark.usefixtures("two_devices")
def test_so_do_gradients() -> None:
    sent = gradients_to_bytes({"x": torch.rand(2), "mask": None, "i": torch.rand(2)})
    read = gradients_from_bytes(sent, device="meta")
    assert read.pop("mask") is None
    assert devices({label: g for label, g in read.items() if g is not None}) == {"x": "meta", "i": "cpu"}
