"""Objects that stand in a class, of a module or of an object that one holds: what is in them is guarded as the model's own is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Part:
    """Something that a configuration holds."""

    def __init__(self) -> None:
        self.by = 1.0


class Config:
    """Numbers, a dict and a part."""

    def __init__(self) -> None:
        self.by, self.table, self.part = 1.0, {"by": 1.0}, Part()


def fresh(asks: Callable[[Any], Any]) -> Any:
    """A model in whose class a configuration stands, and in the class of whose `owner` another."""

    class Net(nn.Module):
        config = Config()

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.owner = type("Owner", (), {"config": Config(), "table": {"by": 1.0}, "by": lambda o: o.config.by})()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)) * asks(self)

    return Net()


def helper(config: Any) -> Any:
    return config.by


def double(config: Any) -> None:
    config.by = config.part.by = config.table["by"] = 2.0


ASKED: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: m.config.by,
    "dict": lambda m: m.config.table["by"],
    "part": lambda m: m.config.part.by,
    "by its class": lambda m: type(m).config.by,
    "by a function": lambda m: helper(m.config),
    "of an object": lambda m: m.owner.config.by,
    "of an object, dict": lambda m: m.owner.config.table["by"],
    "of an object, part": lambda m: m.owner.config.part.by,
    "of an object, in its class": lambda m: m.owner.table["by"],
    "of an object, by a function": lambda m: helper(m.owner.config),
    "of an object, by a method": lambda m: m.owner.by(),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ASKED)
def test_what_changes_in_one_is_refused(name: str) -> None:
    model = fresh(ASKED[name])
    split = prepare_split(model, (X,), split="after:first")
    copied = copy.deepcopy(split)
    for each in (split, copied):
        assert torch.equal(each.run_suffix(each.run_prefix(X)), model(X))
    double(model.config)
    double(model.owner.config)
    type(model.owner).table["by"] = 2.0  # type: ignore[attr-defined]
    for each in (split, copied):
        with pytest.raises(ModuleError, match="undo that, or call prepare_split again"):
            each.run_suffix(each.run_prefix(X))
