"""What forward comes to by a class: its methods that take no object, its subclasses, its own class, a table that renames."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.guards.around import Surroundings
from ariadne.guards.baseline import Baseline
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)
Case = tuple[
    Callable[[Any], float], Any, Callable[[], Any]
]  # what forward asks of a thing, the thing, and what changes


def renamed() -> Case:
    class Config:
        attribute_map: ClassVar = {"d": "hidden"}

        def __init__(self) -> None:
            self.hidden, self.other = 2.0, 4.0

        def __getattribute__(self, key: str) -> Any:
            if key != "attribute_map" and key in super().__getattribute__("attribute_map"):
                key = super().__getattribute__("attribute_map")[key]
            return super().__getattribute__(key)

    return lambda c: c.d, Config(), lambda: setattr(Config, "attribute_map", {"d": "other"})


def default_by_getattribute() -> Case:
    class Config:
        hidden = 2.0

        def __getattribute__(self, key: str) -> Any:
            return object.__getattribute__(self, "hidden" if key == "d" else key)

    return lambda c: c.d, Config(), lambda: setattr(Config, "hidden", 3.0)


def default_past_getattribute() -> Case:
    class Config:
        k = 2.0

    return lambda c: object.__getattribute__(c, "k"), Config(), lambda: setattr(Config, "k", 3.0)


def table_of_the_class() -> Case:
    class Config:
        table: ClassVar = {"d": 2.0}

        def __getattr__(self, key: str) -> float:
            return type(self).table[key]

    return lambda c: c.d, Config(), lambda: Config.table.update(d=3.0)


def attribute_before_getattr() -> Case:
    class Config:
        def __getattr__(self, key: str) -> float:
            return 1.0

    return lambda c: c.q, Config(), lambda: setattr(Config, "q", 4.0)


def static_method() -> Case:
    class Tool:
        @staticmethod
        def z() -> float:
            return 1.0

    return lambda tool: tool.z(), Tool, lambda: setattr(Tool, "z", staticmethod(lambda: 2.0))


def static_method_of_an_object() -> Case:
    asks, tool, change = static_method()
    return asks, tool(), change


def partial_method() -> Case:
    class Tool:
        def g(self, a: float, k: float) -> float:
            return a * k

        h = functools.partialmethod(g, 2.0)

    return lambda tool: tool.h(1.0), Tool(), lambda: setattr(Tool, "h", functools.partialmethod(Tool.g, 3.0))


def property_by_name() -> Case:
    class Tool:
        def __init__(self) -> None:
            self._k = 2.0

        k = property(operator.attrgetter("_k"))

    tool = Tool()
    return lambda tool: tool.k, tool, lambda: setattr(tool, "_k", 3.0)


def subclasses() -> Case:
    class Base:
        k = 0.0

    keep: list[type] = [type("One", (Base,), {"k": 2.0})]

    def asks(base: Any) -> float:
        return float(sum(c.k for c in base.__subclasses__()))

    return asks, Base, lambda: keep.append(type("Two", (Base,), {"k": 5.0}))


def number_of_a_subclass() -> Case:
    asks, base, _ = subclasses()
    one = type("One", (base,), {"k": 2.0})
    return asks, base, lambda: setattr(one, "k", 3.0)


def class_of_the_class() -> Case:
    meta = type("Meta", (type,), {"k": 2.0})
    tool = meta("Tool", (), {})
    return lambda tool: tool.k, tool, lambda: setattr(tool, "k", 9.0)


def getattr_of_the_class_of_the_class() -> Case:
    class Meta(type):
        def __getattr__(cls, key: str) -> float:
            return 1.0

    class Tool(metaclass=Meta):
        pass

    return lambda tool: tool.q, Tool, lambda: setattr(Tool, "q", 9.0)


def static_methods_in_a_list() -> Case:
    _, tool, change = static_method()
    return lambda tools: sum(t.z() for t in tools), [tool(), tool()], change


def classes_in_a_dict() -> Case:
    class Tool:
        k = 1.0

    return lambda tools: sum(t.k for t in tools.values()), {"a": Tool}, lambda: setattr(Tool, "k", 2.0)


def bases_of_a_class() -> Case:
    class Base:
        k = 1.0

    tool = type("Tool", (Base,), {})
    return lambda tool: sum(vars(c).get("k", 0.0) for c in tool.__mro__), tool, lambda: setattr(tool, "k", 2.0)


def table_of_a_class_further_in() -> Case:
    class Inner:
        table: ClassVar = {"k": 2.0}

        def get(self) -> float:
            return self.table["k"]

    space = types.SimpleNamespace(inner=Inner())
    return lambda s: sum(v.get() for v in vars(s).values()), space, lambda: Inner.table.update(k=3.0)


ASKED: dict[str, Callable[[], Case]] = {
    f.__name__: f
    for f in (
        renamed, default_by_getattribute, default_past_getattribute, table_of_the_class, attribute_before_getattr,
        static_method, static_method_of_an_object, partial_method, property_by_name, subclasses, number_of_a_subclass,
        class_of_the_class, getattr_of_the_class_of_the_class, static_methods_in_a_list, classes_in_a_dict,
        bases_of_a_class, table_of_a_class_further_in,
    )
}  # fmt: skip


class Net(nn.Module):
    """A number between two layers."""

    def __init__(self, asks: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.last, self.asks, self.thing = nn.Linear(4, 4), nn.Linear(4, 4), asks, None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) * self.asks(self.thing)))


def refused(name: str, held: bool) -> None:
    """See a split refuse another answer, of a thing that the model holds, or that stands around a function."""
    asks, thing, change = ASKED[name]()
    model = Net(asks if held else lambda _: asks(thing))
    if held:
        model.thing = thing
    refuses_after(model, X, change)


@torch.no_grad()
@pytest.mark.parametrize("name", ASKED)
def test_another_answer_of_a_thing_around_a_function_is_refused(name: str) -> None:
    refused(name, held=False)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [n if "getattribute" in n else pytest.param(n, marks=pytest.mark.variants) for n in ASKED]
)
def test_another_answer_of_a_thing_that_the_model_holds_is_refused(name: str) -> None:
    refused(name, held=True)


@torch.no_grad()
def test_another_method_of_a_class_may_come_to_it() -> None:
    asks, tool, _ = static_method()
    model = Net(lambda _: asks(tool))
    split = prepare_split(model, (X,), split="after:first")
    whole = model(X)
    tool.another = staticmethod(lambda: 2.0)
    assert torch.equal(split.run_suffix(split.run_prefix(X)), whole)


@torch.no_grad()
@pytest.mark.parametrize(("name", "held"), [("static_method", False), ("default_past_getattribute", True)])
def test_a_guard_that_does_not_look_into_classes_is_noticed(
    name: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Surroundings, "_through_class", lambda *_: ())
    monkeypatch.setattr("ariadne.guards.around.in_class", lambda *_: ())
    monkeypatch.setattr(Baseline, "_note_classes", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(name, held)
