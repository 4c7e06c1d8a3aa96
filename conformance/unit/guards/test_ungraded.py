"""Buffers whose gradient forward asks for: that there is none is held by a guard, as quantizers ask that move their codes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import ModuleError, UnsupportedError


class Codes(nn.Module):
    """Moves its codes on by what came in, and by their gradient, where somebody gave them one."""

    def __init__(self, gives_one: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.gives_one = nn.Linear(4, 4), nn.Linear(4, 2), gives_one
        self.register_buffer("codes", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        codes: Any = self.codes
        new = h.detach().mean(0)
        if codes.grad is not None:
            new.add_(codes.grad)
            codes.grad = None
        elif self.gives_one:
            codes.grad = torch.ones(4)
        if self.training:
            codes.data.lerp_(new, 0.5)
        found: Tensor = self.leave(h * codes)
        return found


def test_a_buffer_without_a_gradient_is_followed_in_training() -> None:
    model = Codes()
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("after:enter", trainable=True))
    for batch in (3, 1):
        x = torch.randn(batch, 4)
        expected = whole(x).square().sum()
        expected.backward()
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().sum())
        runtime.backward_prefix(boundary, gradients)
        assert torch.equal(loss, expected)
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
        )
    assert len(runtime.plans) <= 2


@pytest.mark.parametrize("on_change", ["capture", "refuse"])
def test_a_buffer_that_was_given_a_gradient_since_is_noticed(on_change: Any) -> None:
    model, x = Codes().eval(), torch.randn(2, 4)
    runtime = prepare_split(model, (x,), split="after:enter", on_change=on_change)
    runtime.run_suffix(runtime.run_prefix(x))
    model.codes.grad = torch.ones(4)
    with pytest.raises((ModuleError, UnsupportedError), match=r"gradient|asks 'grad'"):
        runtime.run_suffix(runtime.run_prefix(x))


def test_a_forward_that_gives_a_buffer_a_gradient_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="grad"):
        prepare_split(Codes(gives_one=True).eval(), (torch.randn(2, 4),), split="after:enter")


def test_of_a_parameter_the_gradient_is_not_asked() -> None:
    class Asks(Codes):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.enter.weight.grad is None else x

    with pytest.raises(UnsupportedError, match="asks 'grad' of an input, or of a tensor of the model"):
        prepare_split(Asks(), (torch.randn(2, 4),), split="after:enter")
