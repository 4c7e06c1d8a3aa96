"""Objects that are hooks, that have a method as one, or that a partial function hands to one: what they hold is guarded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Scales:
    """It multiplies what a layer gives, and keeps what it saw."""

    def __init__(self) -> None:
        self.by, self.table, self.seen = 1.0, {"by": 1.0}, None

    def __call__(self, module: Any, args: Any, out: Tensor) -> Tensor:
        self.seen = out
        return out * self.by

    def method(self, module: Any, args: Any, out: Tensor) -> Tensor:
        return out * self.helper()

    def helper(self) -> float:
        return self.by

    def of_table(self, module: Any, args: Any, out: Tensor) -> Tensor:
        return out * self.table["by"] * getattr(self, "more", 1.0)


class Slotted:
    """An object with a place for an attribute that is not there yet."""

    __slots__ = ("by",)


def handed(module: Any, args: Any, out: Tensor, scales: Any) -> Tensor:
    return out * getattr(scales, "by", 1.0)


HOOKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "object": (lambda s: s, "by"), "method": (lambda s: s.method, "by"), "late": (lambda s: s.of_table, "more"),
    "partial": (lambda s: functools.partial(handed, scales=s), "by"),
    "partial method": (lambda s: functools.partial(Scales.method, s), "by"),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", HOOKS)
def test_an_attribute_of_it_that_changes_is_refused(name: str) -> None:
    model, scales = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Scales()
    hook, attribute = HOOKS[name]
    model[1].register_forward_hook(hook(scales))
    split = prepare_split(model, (X,), split="after:0")
    for _ in range(2):
        assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
    copied = copy.deepcopy(split)
    assert torch.equal(copied.run_suffix(copied.run_prefix(X)), model(X))
    setattr(scales, attribute, 2.0)
    with pytest.raises(ModuleError, match="Scales of a hook"):
        split.run_suffix(split.run_prefix(X))


@torch.no_grad()
def test_a_slot_that_is_filled_later_is_refused() -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * getattr(self.thing, "by", 1.0)

    model = Net(nn.Linear(4, 4), nn.Linear(4, 4))
    model.thing = Slotted()
    split = prepare_split(model, (X,), split="after:0")
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
    model.thing.by = 2.0
    with pytest.raises(ModuleError, match=r"Slotted\.by|thing\.by"):
        split.run_suffix(split.run_prefix(X))
