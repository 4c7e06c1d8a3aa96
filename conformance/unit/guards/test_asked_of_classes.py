"""What forward asks of a class, of an object by its class, of a module by its name, of a logger: another answer is refused."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)
HERE = sys.modules[__name__]
IN_MODULE = 1.0
Part = Callable[[Any], Any]


def fresh(asks: Part) -> tuple[Any, type]:
    """A model whose class, and the class of whose `config`, have bases of their own; (model, base)."""

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
            self.config = type("Config", (type("BaseConfig", (), {}),), {})()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)) * asks(self)

    return type("Model", (Base,), {})(), Base


def by_class(m: Any) -> float:
    kind = type(m)
    return float(getattr(kind, "extra", 1.0))


def by_trying(m: Any) -> float:
    try:
        return float(m.config.extra)
    except AttributeError:
        return 1.0


def helper(config: Any) -> float:
    return float(getattr(config, "extra", 1.0))


def on_class(m: Any) -> None:
    type(m).extra = 2.0


def on_base(m: Any) -> None:
    type(m).__mro__[1].extra = 2.0


def on_config(m: Any) -> None:
    m.config.extra = 2.0


def on_its_class(m: Any) -> None:
    type(m.config).extra = 2.0


def on_its_base(m: Any) -> None:
    type(m.config).__mro__[1].extra = 2.0


def logs(m: Any) -> None:
    logging.getLogger("ariadne.test.level").setLevel(5)


ASKED: dict[str, tuple[Part, Part]] = {
    "getattr of the class": (lambda m: getattr(type(m), "extra", 1.0), on_class),
    "getattr of the class, by a variable": (by_class, on_class),
    "hasattr of the class": (lambda m: 2 if hasattr(m.__class__, "extra") else 1, on_base),
    "vars of the class": (lambda m: vars(type(m)).get("extra", 1.0), on_class),
    "dir of the class": (lambda m: 2 if "extra" in dir(type(m)) else 1, on_base),
    "name of the class": (lambda m: len(type(m).__name__), lambda m: setattr(type(m), "__name__", "Another")),
    "getattr of an object": (lambda m: getattr(m.config, "extra", 1.0), on_its_class),
    "getattr of an object, base": (lambda m: getattr(m.config, "extra", 1.0), on_its_base),
    "getattr of an object, itself": (lambda m: getattr(m.config, "extra", 1.0), on_config),
    "attribute of an object, tried": (by_trying, on_its_class),
    "by a function": (lambda m: helper(m.config), on_its_base),
    "hasattr of an object's class": (lambda m: 2 if hasattr(type(m.config), "extra") else 1, on_its_class),
    "vars of an object": (lambda m: 2 if "extra" in vars(m.config) else 1, on_config),
    "dir of an object": (lambda m: 2 if "extra" in dir(m.config) else 1, on_config),
    "count of an object's": (lambda m: 1 + len(m.config.__dict__), on_config),
    "sys.modules": (lambda m: getattr(sys.modules[__name__], "IN_MODULE"), lambda m: setattr(HERE, "IN_MODULE", 2.0)),  # noqa: B009
    "a logger's level": (lambda m: logging.getLogger("ariadne.test.level").getEffectiveLevel(), logs),
    "object.__getattribute__": (lambda m: object.__getattribute__(m, "seen"), lambda m: setattr(m, "seen", 2.0)),
    "getattr_static": (lambda m: inspect.getattr_static(m, "extra", 1.0), lambda m: setattr(m, "extra", 2.0)),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ASKED)
def test_another_answer_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "IN_MODULE", 1.0)
    logger = logging.getLogger("ariadne.test.level")
    monkeypatch.setattr(logger, "level", 0)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    asks, change = ASKED[name]
    model, _ = fresh(asks)
    split = prepare_split(model, (X,), split="after:first")
    whole = model(X)
    assert torch.equal(split.run_suffix(split.run_prefix(X)), whole)
    change(model)
    assert not torch.equal(model(X), whole), "the change counts"
    with pytest.raises(ModuleError, match="undo that, or call prepare_split again"):
        split.run_suffix(split.run_prefix(X))


@torch.no_grad()
def test_a_name_that_forward_does_not_ask_for_may_come_to_a_class() -> None:
    model, _ = fresh(ASKED["hasattr of the class"][0])
    split = prepare_split(model, (X,), split="after:first")
    type(model).something_else = 2.0
    type(model.config).something_else = 2.0
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
