"""An input that requires grad and that forward writes into is still the input: returned and kept, it is the caller's own tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ariadne


class Scaled(nn.Module):
    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.keep, self.records = keep, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            x.mul_(2)
        if self.keep:
            self.records.append(x)
            return self.b(self.a(x).relu())
        return self.b(self.a(x).relu()), x


def leaf(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def prepared(keep: bool, trainable: bool) -> tuple[Scaled, ariadne.SplitRuntime]:
    torch.manual_seed(0)
    model = Scaled(keep)
    spec = ariadne.SplitSpec(boundary="after:a", trainable=trainable)
    return model, ariadne.prepare_split(model, (leaf(2),), split=spec, fallback="refuse")


@pytest.mark.parametrize("rows", [2, 3])
def test_what_is_kept_is_the_callers_tensor(rows: int) -> None:
    model, runtime = prepared(keep=True, trainable=False)
    model.records.clear()
    x = leaf(rows)
    runtime.run_suffix(runtime.run_prefix(x))
    (kept,) = model.records
    assert kept is x


def test_the_gradient_of_a_loss_reaches_an_input_through_the_output_that_it_is() -> None:
    def loss(out: Any, target: None) -> torch.Tensor:
        return out[0].pow(2).sum() + (out[1] * 3).sum()

    model, runtime = prepared(keep=False, trainable=True)
    x = leaf(3)
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, None, loss_fn=loss)
    runtime.backward_prefix(boundary, gradients)

    expected = leaf(3)
    model.zero_grad()
    loss(model(expected), None).backward()
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)
    assert runtime.run_suffix(runtime.run_prefix(x))[1] is x
