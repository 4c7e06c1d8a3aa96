"""A boundary that is copied, or pickled, is as one that was sent as bytes: what is written into afterwards does not reach it."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251 - what a boundary must stand
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitRuntime, prepare_split
from ariadne.errors import BoundaryError


class Crossing(nn.Module):
    """(B, 8) to (B, 8); beside its features an input crosses, or a view of a weight or of a buffer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.a, self.b = what, nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(1, 8))
        self.register_buffer("mean", torch.rand(1, 8))

    def source(self, x: Tensor) -> Tensor:
        found: Tensor = x if self.what == "input" else getattr(self, self.what)
        return found

    def forward(self, x: Tensor) -> Tensor:
        beside = self.source(x).expand(x.shape[0], -1)
        out: Tensor = self.b(self.a(x)) + beside
        return out


def _saved(boundary: BoundaryPayload) -> Any:
    file = io.BytesIO()
    torch.save(boundary, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


HOW: dict[str, Callable[[BoundaryPayload], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda boundary: pickle.loads(pickle.dumps(boundary)),  # noqa: S301
    "torch.save": _saved,
    "in a list": lambda boundary: copy.deepcopy([boundary])[0],
}


def prepared(what: str) -> tuple[Crossing, SplitRuntime, Tensor]:
    torch.manual_seed(0)
    model = Crossing(what).eval()
    runtime = prepare_split(model, (torch.randn(3, 8),), split="after:a")
    assert isinstance(runtime, SplitRuntime)
    return model, runtime, torch.randn(5, 8)


@pytest.mark.parametrize("how", sorted(HOW))
@pytest.mark.parametrize("what", ["input", "mean", "weight"])
def test_a_copy_goes_on_from_what_the_prefix_gave(what: str, how: str) -> None:
    model, runtime, x = prepared(what)
    with torch.no_grad():
        for writes in range(3):  # by you, before the prefix
            expected = model(x)
            boundary = runtime.run_prefix(x)
            copied = HOW[how](boundary)
            assert torch.equal(runtime.run_suffix(copied), expected)
            model.source(x).add_(0.5)
            assert torch.equal(copied.tensors[copied.labels[-1]], HOW[how](copied).tensors[copied.labels[-1]]), writes
            with pytest.raises(BoundaryError, match="was written into"):
                runtime.run_suffix(boundary)
            with pytest.raises(BoundaryError, match="was written into"):
                HOW[how](boundary)


@pytest.mark.parametrize("how", sorted(HOW))
def test_a_copy_of_a_training_boundary_trains_as_bytes_do(how: str) -> None:
    model, runtime, x = prepared("weight")
    whole = copy.deepcopy(model)
    whole(x).square().mean().backward()
    boundary = runtime.run_training_prefix(x)
    sent = HOW[how](boundary)
    assert boundary.supports_prefix_backward
    assert not sent.supports_prefix_backward
    _, gradients = runtime.train_suffix(sent, loss_fn=lambda out, _: out.square().mean())
    runtime.backward_prefix(boundary, gradients)
    for name, p in whole.named_parameters():
        assert torch.equal(p.grad, model.get_parameter(name).grad), name


def test_a_shallow_copy_is_the_same_boundary() -> None:
    _, runtime, x = prepared("input")
    boundary = runtime.run_prefix(x)
    assert copy.copy(boundary) is boundary
