"""Parts that are called one by one: the first one has a plan captured for what none serves yet, as the pipeline itself has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import GuardError
from ariadne.pipeline import Pipeline, prepare_pipeline
from ariadne.pipeline.part import ModelPart, Part


class Asks(nn.Module):
    """Three things that it asks for lead it to another plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.shape[0] > 4:
            h = h.tanh()
        if torch.is_autocast_enabled("cpu"):
            h = h * 2
        if not x.is_contiguous():
            h = h * 3
        return self.b(h.relu())


def pipelined() -> tuple[Asks, Pipeline]:
    net = Asks()
    return net, prepare_pipeline(net, (torch.ones(2, 4),), parts=2)


def by_parts(pipeline: Pipeline, x: Tensor) -> Any:
    with torch.no_grad():
        return pipeline.parts[1](pipeline.parts[0](x))


def larger(net: nn.Module) -> Tensor:
    return torch.ones(6, 4)


def laid_out_otherwise(net: nn.Module) -> Tensor:
    return torch.ones(4, 3).t()


def double(net: nn.Module) -> Tensor:
    return torch.ones(3, 4, dtype=net.double().a.weight.dtype)


@pytest.mark.parametrize("change", [larger, laid_out_otherwise, double], ids=lambda f: f.__name__)
def test_the_first_part_serves_a_call_that_needs_another_plan(
    change: Callable[[nn.Module], Tensor],
) -> None:
    net, pipeline = pipelined()
    x = change(net)
    with torch.no_grad():
        whole = net(x)
    assert torch.equal(by_parts(pipeline, x), whole)


def test_under_autocast_that_it_asks_for() -> None:
    net, pipeline = pipelined()
    x = torch.ones(3, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(by_parts(pipeline, x), net(x))


def test_what_a_part_alone_can_not_serve_is_told_in_full() -> None:
    _, pipeline = pipelined()
    words = r"one part was asked for a call on torch.float32 \[6, 4\], and no plan .* Call\s+pipeline\(\.\.\.\)"
    with pytest.raises(GuardError, match=words):
        pipeline.parts[0].runtime.run_prefix(torch.ones(6, 4))
    assert torch.equal(by_parts(pipeline, torch.ones(6, 4)), pipeline(torch.ones(6, 4)))


@pytest.mark.planted
def test_a_part_that_has_nothing_captured_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelPart, "fly", Part.fly)
    with pytest.raises(GuardError):
        by_parts(pipelined()[1], torch.ones(6, 4))
