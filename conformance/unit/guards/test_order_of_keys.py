"""A dict on the model whose keys come to stand in another order is another dict, whatever stands in it."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split

X = torch.ones(2, 4)
ONE, OTHER = torch.ones(4), torch.arange(4.0)


class Steered(nn.Module):
    """(B, 4) to (B, 3): what `walk` finds in `kept` is applied one after the other."""

    def __init__(self, kept: Any, walk: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.kept, self.walk = nn.Linear(4, 4), nn.Linear(4, 3), kept, walk
        self.register_buffer("p", ONE.clone())
        self.register_buffer("q", OTHER.clone())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for one in self.walk(self):
            h = one(h) if callable(one) else h * 2 + one
        found: Tensor = self.b(h)
        return found


def again(table: Any, key: str = "a") -> None:
    """Take an entry out, and put it back: it comes last."""
    table[key] = table.pop(key)


def values(m: Any) -> Any:
    return m.kept.values()


TABLES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensors": (lambda: {"a": ONE, "b": OTHER}, values, lambda m: again(m.kept)),
    "ordered": (
        lambda: collections.OrderedDict(a=ONE, b=OTHER),
        lambda m: [v for _, v in m.kept.items()],
        lambda m: m.kept.move_to_end("a"),
    ),
    "functions": (lambda: {"a": torch.exp, "b": torch.tanh}, values, lambda m: again(m.kept)),
    "modules": (lambda: {"a": nn.Linear(4, 4), "b": nn.Tanh()}, values, lambda m: again(m.kept)),
    "lists": (lambda: {"a": [ONE], "b": [OTHER]}, lambda m: [v[0] for v in m.kept.values()], lambda m: again(m.kept)),
    "in an object": (
        lambda: types.SimpleNamespace(d={"a": ONE, "b": OTHER}),
        lambda m: m.kept.d.values(),
        lambda m: again(m.kept.d),
    ),
    "of users": (lambda: collections.UserDict(a=ONE, b=OTHER), values, lambda m: again(m.kept)),
    "buffers": (lambda: None, lambda m: m._buffers.values(), lambda m: again(m._buffers, "p")),
    "parameters": (
        lambda: None,
        lambda m: m.b._parameters["bias"].detach().sum() + torch.stack([v.sum() for v in m.a._parameters.values()]),
        lambda m: again(m.a._parameters, "weight"),
    ),
    "state_dict": (
        lambda: None,
        lambda m: [v for k, v in m.state_dict().items() if k in "pq"],
        lambda m: again(m._buffers, "p"),
    ),
    "a renamed key": (lambda: {"a": ONE, "b": OTHER}, values, lambda m: m.kept.update(c=m.kept.pop("a"))),
}


def split(kept: Any, walk: Callable[[Any], Any]) -> tuple[Steered, SplitRuntime]:
    model = Steered(kept, walk).eval()
    return model, prepare_split(model, (X,), split="after:a")


@pytest.mark.parametrize("name", TABLES)
def test_another_order_of_keys_is_an_error(name: str) -> None:
    make, walk, change = TABLES[name]
    model, runtime = split(make(), walk)
    runtime.run_suffix(runtime.run_prefix(X))
    change(model)
    with pytest.raises(ModuleError, match="prepare_split again"):
        runtime.run_suffix(runtime.run_prefix(X))


def test_other_tensors_under_the_same_keys_are_followed() -> None:
    """They are read anew in each call, and a key that is equal does as well."""
    model, runtime = split({"a": ONE, "b": OTHER}, values)
    model.kept["a"] = OTHER * 3
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


@pytest.mark.parametrize("kept", [{"a": ONE}, [ONE]])
def test_none_in_the_place_of_a_tensor_is_an_error_of_ours(kept: Any) -> None:
    model, runtime = split(kept, lambda m: [m.kept[next(iter(m.kept))] if isinstance(m.kept, dict) else m.kept[0]])
    model.kept["a" if isinstance(kept, dict) else 0] = None
    with pytest.raises(ModuleError, match="kept"):
        runtime.run_suffix(runtime.run_prefix(X))
