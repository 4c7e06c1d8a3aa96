"""Tensors whose sizes an op changes in place: what made them, made them of the sizes that they had then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ariadne import prepare_split


@torch.jit.script
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * x.sigmoid()


def rolled(h: torch.Tensor) -> torch.Tensor:
    one, other = h.unsqueeze(1).split(2, 2)
    one, other = one * 1, other * 1
    one.squeeze_(1)
    other.transpose_(1, 2)
    return torch.cat([one, other.squeeze(2)], 1)


def positives(h: torch.Tensor) -> torch.Tensor:
    found = (h > 0).nonzero()
    found.unsqueeze_(0)
    return h * found.shape[1]


def in_turn(h: torch.Tensor) -> torch.Tensor:
    t = h[:, None] * 1
    t.squeeze_(1)
    t = t.mul_(2)
    t.unsqueeze_(0)
    t.transpose_(1, 2)
    return t[0].t() + 1


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeeze": lambda h: (h[:, None] * 2).squeeze_(1) + 1,
    "unsqueeze": lambda h: (h * 2).unsqueeze_(1).sum(1),
    "transpose": lambda h: (h * 2).transpose_(0, 1).contiguous().t(),
    "t": lambda h: (h * 2).t_().relu().t(),
    "as_strided": lambda h: (h * 2).as_strided_((h.shape[0], 2), (4, 1)).repeat(1, 2),
    "of pieces": rolled,
    "sizes that follow data": positives,
    "several times": in_turn,
    "of a product": lambda h: (h.sum(0, keepdim=True) @ h.t()).squeeze_(0)[:, None] + h,
    "of a scripted function": lambda h: swish(h[:, None]).squeeze_(1),
    "a gradient through linear": lambda h: nn.functional.linear(h.sum(1), h.new_ones(4, h.shape[0])) + h,
}


class Reshapes(nn.Module):
    """(B, 4) -> (B, 4); in a plan of real runs where it `asks`."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor], asks: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.way, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), way, asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        if self.asks and h.sum() > 1e9:
            return h
        return self.leave(self.way(h))


@pytest.mark.parametrize("asks", [False, True], ids=["symbolic", "real runs"])
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_is_reshaped_in_place_was_made_as_it_was(way: str, asks: bool) -> None:
    torch.manual_seed(0)
    model = Reshapes(WAYS[way], asks)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="percent:50", fallback="refuse")
    assert runtime.plan.captured_by.startswith("observed") or not asks
    for cut in runtime.candidates:
        if cut.safe:
            split = runtime.resplit(cut)
            for batch in (2, 1, 3, 6):
                x = torch.randn(batch, 4)
                assert torch.equal(split.run_suffix(split.run_prefix(x)), model(x)), (cut.split_id, batch)


@pytest.mark.parametrize("asks", [False, True], ids=["symbolic", "real runs"])
def test_the_plan_has_the_sizes_that_each_had(asks: bool) -> None:
    model = Reshapes(in_turn, asks)
    plan = prepare_split(model, (torch.randn(2, 4),), split="percent:50").plan
    shapes = [
        [str(d) for d in plan.values[node.outputs[0]].shape]
        for node in plan.nodes
        if node.target.startswith(("aten.mul.", "aten.squeeze_", "aten.unsqueeze_", "aten.transpose_"))
    ]
    assert shapes == [["B", "1", "4"], ["B", "4"], ["1", "B", "4"], ["1", "4", "B"]]
