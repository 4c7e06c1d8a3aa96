"""Watched dicts: with and without versions the same changes are noticed, and a version that tells too little is not trusted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError
from ariadne.guards import kept, watched
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers


class Net(nn.Module):
    of_the_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 3, 3, padding=1, bias=False), nn.BatchNorm1d(3)
        self.rest = nn.Sequential(nn.Tanh(), nn.Dropout(0.25), nn.Linear(4, 4))
        self.scales, self.shift, self.unread = [1.0, 2.0], (1.0, (2.0,)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)) * self.scales[0] + self.shift[1][0]
        return self.rest(x * getattr(self, "extra", 1.0) * self.of_the_class)


def prepared() -> SplitRuntime:
    torch.manual_seed(0)
    return prepare_split(Net().eval(), (numbers(2, 3, 4),), split="after:norm")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a class": lambda m: setattr(m.rest[0], "__class__", nn.ReLU),
    "a dict of parameters replaced": lambda m: setattr(m.conv, "_parameters", dict(m.conv._parameters)),
    "a flag": lambda m: m.rest[1].train(),
    "a flag in the dict": lambda m: vars(m.norm).update(training=True),
    "a list": lambda m: m.scales.__setitem__(0, 3.0),
    "a member": lambda m: m.rest.__setitem__(0, nn.ReLU()),
    "a member in the dict": lambda m: m.rest._modules.update({"0": nn.ReLU()}),
    "a member less": lambda m: m.rest.__delitem__(1),
    "a number": lambda m: setattr(m.norm, "eps", 0.5),
    "a number of another type": lambda m: setattr(m.conv, "groups", True),
    "a number past the module": lambda m: object.__setattr__(m.norm, "eps", 0.5),
    "a parameter where none was": lambda m: setattr(m.conv, "bias", nn.Parameter(numbers(3))),
    "a tuple": lambda m: setattr(m, "shift", (1.0, (3.0,))),
    "an attribute before that of the class": lambda m: (vars(m).pop("unread"), setattr(m, "of_the_class", 2.0)),
    "an attribute more": lambda m: setattr(m, "extra", 2.0),
    "an attribute more for one less": lambda m: (vars(m).pop("unread"), setattr(m, "extra", 2.0)),
    "members in each other's places": lambda m: m.rest._modules.update({"0": m.rest[1], "1": m.rest[0]}),
    "the dict of a module replaced": lambda m: setattr(m.norm, "__dict__", {**vars(m.norm), "eps": 0.5}),
    "members in another order": lambda m: setattr(m.rest, "_modules", dict(reversed(list(m.rest._modules.items())))),
}


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(watched, "VERSION", None)
        monkeypatch.setattr(kept, "VERSION", None)
    return bool(request.param)


def replayed(runtime: SplitRuntime, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return runtime.run_suffix(runtime.run_prefix(x))


@pytest.mark.parametrize("name", sorted(CHANGES))
@pytest.mark.parametrize("warm", [False, True])
def test_a_change_is_refused_at_the_first_call_and_later(name: str, warm: bool, versions: bool) -> None:
    runtime, x = prepared(), numbers(3, 3, 4)
    if warm:
        for _ in range(3):
            replayed(runtime, x)
    CHANGES[name](runtime.model)
    for _ in range(2):
        with pytest.raises(ModuleError):
            replayed(runtime, x)
    with pytest.raises(ModuleError):
        replayed(copy.deepcopy(runtime), x)


def test_what_is_put_back_is_welcome(versions: bool) -> None:
    runtime, x = prepared(), numbers(3, 3, 4)
    model: Any = runtime.model
    expected = replayed(runtime, x)
    for _ in range(3):
        model.norm.eps, eps = 0.5, model.norm.eps
        with pytest.raises(ModuleError):
            replayed(runtime, x)
        model.norm.eps = eps
        assert torch.equal(replayed(runtime, x), expected)
    model.note = "of no matter"
    assert torch.equal(replayed(runtime, x), expected)


def test_a_dict_that_nobody_wrote_is_not_looked_at_again() -> None:
    runtime, x = prepared(), numbers(3, 3, 4)
    guard = runtime._now[False].prefix_guard
    replayed(runtime, x)
    for part in guard._parts:
        part.still = lambda: False  # what is only asked after a write
    replayed(runtime, x)
    runtime.model.note = 1
    assert not guard()
