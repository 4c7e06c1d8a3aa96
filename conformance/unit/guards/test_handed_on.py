"""A module whose own `__getattr__` hands on what it lacks: what comes to stand in the module, or in its class, hides that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.temperature, self.act = nn.Linear(4, 4), nn.Linear(4, 3), 1.5, torch.relu


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x))) * self.temperature


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "a function": lambda m, _: setattr(m, "act", torch.tanh),
    "a module": lambda m, _: setattr(m, "b", nn.Linear(4, 3)),
    "a number": lambda m, _: setattr(m, "temperature", 3.0),
    "in its class": lambda m, patch: patch.setattr(type(m), "temperature", 3.0, raising=False),
}


@torch.no_grad()
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_what_comes_to_hide_it_is_refused_by_name(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Around()
    runtime = prepare_split(net, (X,), split="percent:50")
    before = net(X)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), before)
    CHANGES[change](net, monkeypatch)
    assert not torch.equal(net(X), before)
    with pytest.raises(ModuleError):
        runtime.run_suffix(runtime.run_prefix(X))
