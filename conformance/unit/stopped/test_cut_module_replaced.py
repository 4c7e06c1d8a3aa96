"""The module after which a Python split is cut may be replaced, as any other; where none stands there, the call says so."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import ModuleError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        found = self.b(self.act(h) if self.act is not None else h)
        random.random()
        return found


def split(trainable: bool = False) -> tuple[Net, Any, Tensor]:
    m, x = Net(), torch.randn(3, 4)
    return m, prepare_split(m, (x,), split=SplitSpec("after:act", trainable=trainable), fallback="python"), x


@pytest.mark.parametrize("new", [nn.GELU, nn.ReLU, nn.Tanh])
def test_forward_stops_after_the_new_one(new: type[nn.Module]) -> None:
    m, runtime, x = split()
    for _ in range(2):
        m.act = new()
        boundary = runtime.run_prefix(x)
        assert [tuple(t.shape) for t in boundary.raw] == [(3, 4)]
        assert torch.equal(runtime.run_suffix(boundary), m(x))


def test_training_goes_on_after_the_new_one() -> None:
    m, runtime, x = split(trainable=True)
    m.act = nn.Tanh()
    front, back = (torch.optim.SGD(p, 0.1) for p in (runtime.prefix_parameters(), runtime.suffix_parameters()))
    whole = Net()
    whole.act = nn.Tanh()
    one = torch.optim.SGD(whole.parameters(), 0.1)
    for _ in range(2):
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: o.square().mean(), optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        expected = whole(x).square().mean()
        one.zero_grad()
        expected.backward()
        one.step()
        assert torch.equal(loss, expected)
        assert all(map(torch.equal, m.parameters(), whole.parameters()))


def test_where_none_stands_there_the_call_says_so() -> None:
    m, runtime, x = split()
    m.act = None  # type: ignore[assignment]
    with pytest.raises(ModuleError, match="no longer in the model"):
        runtime.run_prefix(x)
    m.act = nn.ReLU()
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), m(x))
