"""What forward sets on a tensor of the model is taken off again after preparing, and refused where a call may use it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.errors import UnsupportedError

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A forward that has `body` between two layers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.body = nn.Linear(4, 8), nn.Linear(8, 2), body
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.body(self, self.enter(x)))
        return found


def _before(m: Any, h: Tensor) -> Tensor:
    mean = h.detach().mean(0)
    before = getattr(m.leave.weight, "seen", mean)
    m.leave.weight.seen = mean
    return h + before


def _first(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m.scale, "mask"):
        m.scale.mask = (h > 0).any(0).float()
    return h * m.scale.mask  # type: ignore[no-any-return]


def _last(m: Any, h: Tensor) -> Tensor:
    m.leave.bias.last = h.detach()
    return h


def _counted(m: Any, h: Tensor) -> Tensor:
    m.leave.weight.calls = getattr(m.leave.weight, "calls", 0) + 1
    return h


def hung(model: nn.Module) -> dict[str, list[str]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: [*vars(t)] for name, t in tensors if vars(t)}


@pytest.mark.parametrize("body", [_before, _first, _last, _counted])
def test_what_forward_sets_on_a_tensor_is_refused_and_a_python_split_does_it(body: Body) -> None:
    model = Net(body).eval()
    whole = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match=r"sets the attribute '\w+' on the tensor '(leave|scale)"):
        prepare_split(model, (torch.randn(2, 4),), split="after:enter")
    assert not hung(model)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="after:enter", fallback="python")
    assert not hung(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4)
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
    assert hung(model) == hung(whole)


def _flag(m: Any, h: Tensor) -> Tensor:
    m.leave.weight.used = True
    return h


def test_a_flag_on_a_tensor_is_a_cache() -> None:
    model = Net(_flag).eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split="after:enter")
    assert not hung(model)
    with torch.no_grad():
        x = torch.randn(3, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


_TEACHER = [nn.Linear(8, 8)]
_TABLE = nn.Parameter(torch.zeros(1))


def _on_a_teacher(m: Any, h: Tensor) -> Tensor:
    _TEACHER[0].weight.last = h.detach().mean()  # type: ignore[assignment]
    return h


def _on_a_variable(m: Any, h: Tensor) -> Tensor:
    _TABLE.last = h.detach().mean()  # type: ignore[attr-defined]
    return h


@pytest.mark.parametrize("body", [_on_a_teacher, _on_a_variable])
def test_so_it_is_with_a_tensor_outside_of_the_model(body: Body) -> None:
    with pytest.raises(UnsupportedError, match=r"sets the attribute 'last' on (a tensor that|the tensor '.outside of)"):
        prepare_split(Net(body).eval(), (torch.randn(2, 4),), split="after:enter")
    assert not vars(_TABLE)
    assert not vars(_TEACHER[0].weight)
