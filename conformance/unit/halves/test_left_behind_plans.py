"""Files of a model that was called or changed since: not of a plan that it has left behind, and of each that still holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import BoundaryPayload, SplitRuntime, prepare_split
from ariadne.errors import HalfError, ModuleError
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.referred = [self.last.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) @ self.referred[0]  # type: ignore[no-any-return]


def by_files(runtime: SplitRuntime, folder: Path) -> Tensor:
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    sent = ariadne.load(folder / "prefix").run_prefix(X).to_bytes()
    found: Tensor = ariadne.load(folder / "suffix").run_suffix(BoundaryPayload.from_bytes(sent))
    return found


@torch.no_grad()
def test_a_file_is_of_no_plan_that_a_replaced_weight_has_left_behind(tmp_path: Path) -> None:
    net = Net().eval()
    runtime = prepare_split(net, (X,), split="after:first")
    assert torch.equal(by_files(runtime, tmp_path), net(X))
    net.load_state_dict({name: t * 2 for name, t in net.state_dict().items()}, assign=True)
    with pytest.raises(HalfError, match=r"in the place of one that forward reaches in two ways.*Call the split once"):
        by_files(runtime, tmp_path)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), net(X))
    assert torch.equal(by_files(runtime, tmp_path), net(X))


class Reversible(nn.Module):
    """RevIN: what the inputs were normalized by is kept in attributes, and read again later in the same call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean(1, keepdim=True).detach()
        return self.last(self.first(x - self.mean).tanh()) + self.mean  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("who", ["the split", "the model"])
def test_a_tensor_that_a_call_left_in_an_attribute_leaves_no_plan_behind(tmp_path: Path, who: str) -> None:
    net = Reversible().eval()
    runtime = prepare_split(net, (X,), split="after:first")
    (net if who == "the model" else runtime.joined)(-X)
    assert torch.equal(by_files(runtime, tmp_path), net(X))
    assert [*runtime.prefix_state_dict()] == ["first.weight", "first.bias"]


def test_what_a_call_left_does_not_hide_what_the_model_has_otherwise(tmp_path: Path) -> None:
    net = Reversible().eval()
    runtime = prepare_split(net, (X,), split="after:first")
    net(X)
    net.train()
    with pytest.raises(ModuleError, match=r"captured in eval mode and is now in train mode.* Or call the split once"):
        runtime.save(tmp_path / "prefix", side="prefix")
    net.eval()
    runtime.save(tmp_path / "prefix", side="prefix")
