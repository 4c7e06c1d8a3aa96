"""Parameters that the loss reads and forward does not, or gives as they are: the optimizer of the suffix steps them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split

FORMS: dict[str, tuple[bool, str]] = {
    "graph": (False, "refuse"),
    "python": (True, "python"),
    "python-suffix": (True, "python-suffix"),
}


class Net(nn.Module):
    """`drawn`: forward draws from `random`, which no graph follows."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drawn = nn.Linear(4, 4), nn.Linear(4, 2), drawn
        self.weights, self.never = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))

    def body(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x).relu())
        if self.drawn:
            random.random()
        return found

    def forward(self, x: Tensor) -> Any:
        return self.body(x)

    def loss(self, out: Any, y: Tensor) -> Tensor:
        return ((-self.weights).exp() * (out - y).square().mean(0) + self.weights).sum()


class Giving(Net):
    def forward(self, x: Tensor) -> Any:
        return self.body(x), self.weights

    def loss(self, out: Any, y: Tensor) -> Tensor:
        return ((-out[1]).exp() * (out[0] - y).square().mean(0) + out[1]).sum()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", [Giving, Net])
def test_it_is_stepped_and_cleared_as_in_the_whole(cls: Callable[[bool], Net], form: str, decay: float) -> None:
    drawn, fallback = FORMS[form]
    whole, split, x, y = cls(drawn), cls(drawn), torch.randn(3, 4), torch.randn(3, 2)
    one = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9, weight_decay=decay)
    runtime: Any = prepare_split(split, (x,), split=SplitSpec("after:a", trainable=True), fallback=fallback)
    sides = runtime.prefix_parameters(), runtime.suffix_parameters()
    assert {*map(id, sides[0] + sides[1])} == {*map(id, split.parameters())}
    assert not {*map(id, sides[0])} & {*map(id, sides[1])}
    front, back = (torch.optim.SGD(side, 0.1, momentum=0.9, weight_decay=decay) for side in sides)
    for _ in range(3):
        expected = whole.loss(whole(x), y)
        one.zero_grad()
        expected.backward()
        one.step()
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, y, loss_fn=split.loss, optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        assert torch.equal(loss, expected)
        for (name, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
            assert torch.equal(p, q), name
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
