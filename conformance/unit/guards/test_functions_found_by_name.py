"""Functions that forward finds by name, in a module, on an object, a class or a function: another one in its place is refused."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

SOURCE = """
def act(x): return x * 2
twice = lambda x: x * 2
def outer(x): return act(x)
outer.impl = act
"""
NAME = "helpers_of_this_test"
X = numbers(2, 4)
mod: Any = None  # the module of that name

Calls = Callable[[Any, torch.Tensor], torch.Tensor]


def other(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Strategy:
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def fixed(x: torch.Tensor) -> torch.Tensor:
        return x * 2


def fresh(calls: Calls) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.helper = Strategy()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(calls(self, self.first(x)))

        @staticmethod
        def stat(x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return Net().eval()


def local(m: Any, h: torch.Tensor) -> torch.Tensor:
    import helpers_of_this_test as q  # type: ignore[import-not-found]  # noqa: PLC0415

    return q.act(h)


def from_local(m: Any, h: torch.Tensor) -> torch.Tensor:
    from helpers_of_this_test import act  # noqa: PLC0415

    return act(h)


def alias(m: Any, h: torch.Tensor) -> torch.Tensor:
    f = mod.act
    return f(h)


def of_kind(m: Any, h: torch.Tensor) -> torch.Tensor:
    kind = type(m)
    return kind.stat(h)


def in_module(m: Any) -> None:
    mod.act = other


def in_class(m: Any) -> None:
    type(m).stat = staticmethod(other)


FOUND: dict[str, tuple[Calls, Callable[[Any], None]]] = {
    "of a module": (lambda m, h: mod.act(h), in_module),
    "of a module, its code": (lambda m, h: mod.act(h), lambda m: setattr(mod.act, "__code__", other.__code__)),
    "of a module, a lambda": (lambda m, h: mod.twice(h), lambda m: setattr(mod, "twice", other)),
    "of a module, within it": (lambda m, h: mod.outer(h), in_module),
    "of a module, imported in forward": (local, in_module),
    "imported in forward": (from_local, in_module),
    "by another name": (alias, in_module),
    "by getattr": (lambda m, h: getattr(mod, "act")(h), in_module),  # noqa: B009
    "by vars": (lambda m, h: vars(mod)["act"](h), in_module),
    "by sys.modules": (lambda m, h: sys.modules["helpers_of_this_test"].act(h), in_module),
    "given to map": (lambda m, h: sum(map(mod.act, [h])), in_module),
    "in a partial function": (lambda m, h: functools.partial(mod.act)(h), in_module),
    "of a function": (lambda m, h: mod.outer.impl(h), lambda m: setattr(mod.outer, "impl", other)),
    "of the model's class": (lambda m, h: type(m).stat(h), in_class),
    "of the model's __class__": (lambda m, h: m.__class__.stat(h), in_class),
    "of the model's class, kept": (of_kind, in_class),
    "of a helper's class": (
        lambda m, h: type(m.helper).fixed(h),
        lambda m: setattr(type(m.helper), "fixed", staticmethod(other)),
    ),
    "of a helper, hidden by its own": (lambda m, h: m.helper.scale(h), lambda m: setattr(m.helper, "scale", other)),
    "of a helper, static": (lambda m, h: m.helper.fixed(h), lambda m: setattr(m.helper, "fixed", other)),
}

USUAL = (
    "of a module",
    "imported in forward",
    "by vars",
    "in a partial function",
    "of a function",
    "of the model's class",
    "of a helper, hidden by its own",
)


@pytest.fixture
def _helpers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setitem(globals(), "mod", made)
    monkeypatch.setattr(Strategy, "fixed", staticmethod(Strategy.fixed))


@torch.no_grad()
@pytest.mark.usefixtures("_helpers")
@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.variants) for name in FOUND]
)
def test_another_function_in_its_place_is_refused(name: str) -> None:
    calls, change = FOUND[name]
    model = fresh(calls)
    split = prepare_split(model, (X,), split="after:first")
    whole = model(X)
    mod.unread, model.helper.unread, type(model).unread = other, other, staticmethod(other)
    assert torch.equal(split.run_suffix(split.run_prefix(X)), whole), "what forward doesn't name may come"
    change(model)
    assert not torch.equal(model(X), whole), "the change counts"
    with pytest.raises(ModuleError, match="undo that, or call prepare_split again"):
        split.run_suffix(split.run_prefix(X))
