"""What a search read is known to stand or not, so that a model is looked through once while it is prepared; and what code tells."""

from __future__ import annotations

import argparse
import dis
import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional
from torch import nn

from ariadne import prepare_split
from ariadne.guards.instructions import imported_in, told_in
from ariadne.guards.roots import _Search, outside_of
from ariadne.guards.searched import Read, searched_once

X = torch.ones(2, 4)


class Slotted:
    __slots__ = ("value",)


class Plain:
    pass


class Other(Plain):
    pass


def _cell() -> tuple[Any, Callable[[], None]]:
    inside = 1

    def read() -> int:
        return inside

    def change() -> None:
        nonlocal inside
        inside = 2

    assert read.__closure__ is not None
    return read.__closure__[0], change


def _function() -> Any:
    def f(a: int = 1, *, b: int = 2) -> int:
        return a + b

    return f


def _of_function(change: Callable[[Any], Any]) -> tuple[Any, Callable[[], Any]]:
    f = _function()
    return f, partial(change, f)


def _of(thing: Any, change: Callable[[Any], Any]) -> tuple[Any, Callable[[], Any]]:
    return thing, partial(change, thing)


def _slotted() -> Slotted:
    made = Slotted()
    made.value = 1
    return made


CHANGES: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {
    "a dict gets a key": lambda: _of({"a": 1}, lambda d: d.update(b=2)),
    "a dict gets another value": lambda: _of({"a": 1}, lambda d: d.update(a=2)),
    "a dict gets another key for the value": lambda: _of({"a": 1}, lambda d: (d.pop("a"), d.update(b=1))),
    "a list": lambda: _of([1], lambda found: found.append(2)),
    "a deque": lambda: _of(deque([1]), lambda found: found.append(2)),
    "a set": lambda: _of({1}, lambda found: found.add(2)),
    "a cell": _cell,
    "a function's code": lambda: _of_function(lambda f: setattr(f, "__code__", _function().__code__.replace())),
    "a function's defaults": lambda: _of_function(lambda f: setattr(f, "__defaults__", (3,))),
    "a function's defaults by keyword": lambda: _of_function(lambda f: f.__kwdefaults__.update(b=3)),
    "a function's attributes": lambda: _of_function(lambda f: setattr(f, "seen", 3)),
    "an object's attributes": lambda: _of(Plain(), lambda thing: setattr(thing, "seen", 3)),
    "an object's class": lambda: _of(Plain(), lambda thing: setattr(thing, "__class__", Other)),
    "an object's slot": lambda: _of(_slotted(), lambda thing: setattr(thing, "value", 2)),
    "a class's bases": lambda: _of(type("C", (Plain,), {}), lambda cls: setattr(cls, "__bases__", (Other,))),
    "a partial function's keywords": lambda: _of(partial(dict, a=1), lambda f: f.keywords.update(a=2)),
    "hooks of a tensor": lambda: _of(torch.ones(1, requires_grad=True), lambda t: t.register_hook(lambda g: g)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_read_stands_until_it_is_changed(name: str) -> None:
    thing, change = CHANGES[name]()
    read = Read()
    read.thing(thing)
    stood = read.stood()
    assert stood.stands()
    change()
    assert not stood.stands()


def test_a_module_that_was_asked_for_and_comes_is_a_change() -> None:
    read = Read()
    assert read.imported("ariadne_of_nowhere") is None
    stood = read.stood()
    assert stood.stands()
    sys.modules["ariadne_of_nowhere"] = types.ModuleType("ariadne_of_nowhere")
    try:
        assert not stood.stands()
    finally:
        del sys.modules["ariadne_of_nowhere"]


class Making(OrderedDict[str, Any]):
    """A dict that makes something anew whenever it is asked, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return [OrderedDict.__getitem__(self, key)]


def test_a_dict_that_gives_something_new_each_time_stands() -> None:
    read = Read()
    read.thing(Making(a=1))
    assert read.stood().stands()


def test_what_is_put_back_stands_again() -> None:
    table, read = {"a": [1], "b": [2]}, Read()
    read.thing(table)
    stood, kept = read.stood(), table["a"]
    table["a"] = [1]
    assert not stood.stands()
    table["a"] = kept
    assert stood.stands()


_SEEN: list[Any] = []


class Counting(nn.Module):
    """A net that reaches a global list and, by a class's attribute, another one."""

    found: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        if self.found is None and not _SEEN:
            return self.b(self.a(x).relu())
        return self.b(self.a(x))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a search was made, as entries of a list."""
    found, all_of = list[int](), _Search.all

    def counted(search: _Search) -> Any:
        found.append(1)
        return all_of(search)

    monkeypatch.setattr(_Search, "all", counted)
    return found


def test_a_model_is_looked_through_once_while_it_is_prepared(searches: list[int]) -> None:
    prepare_split(Counting().eval(), (X,), split="after:a")
    assert len(searches) == 1


def test_a_search_is_made_again_after_a_change(searches: list[int]) -> None:
    model = Counting()
    with searched_once():
        assert outside_of({"": model}) is outside_of({"": model})
        assert len(searches) == 1
        try:
            Counting.found = {}
            assert any(root.now() is Counting.found for root in outside_of({"": model}).roots)
        finally:
            Counting.found = None
        assert len(searches) == 2


def test_outside_of_a_preparation_nothing_is_kept(searches: list[int]) -> None:
    model = Counting()
    outside_of({"": model})
    outside_of({"": model})
    assert len(searches) == 2
    with searched_once():
        outside_of({"": model})
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def _codes(code: CodeType) -> list[CodeType]:
    return [code, *(inner for c in code.co_consts if isinstance(c, CodeType) for inner in _codes(c))]


def test_what_code_tells_is_what_dis_tells() -> None:
    kinds = ("_GLOBAL", "_GLOBALS", "_NAME", "STORE_ATTR", "DELETE_ATTR", "STORE_DEREF")
    classes = [vars(argparse.ArgumentParser), vars(argparse.HelpFormatter), vars(functools.singledispatchmethod)]
    tables = [vars(torch.nn.functional), vars(functools), vars(argparse), *classes]
    seen, names = set[CodeType](), set[str]()
    for f in (f for table in tables for f in table.values() if isinstance(f, FunctionType)):
        seen.update(_codes(f.__code__))
    for code in seen:
        told = [(s.opname, s.argval) for s in dis.get_instructions(code) if s.opname.endswith(kinds)]
        assert {step for step in told_in(code) if type(step[1]) is not int} == {*told}
        names.update(kind for kind, _ in told)
    assert {"LOAD_GLOBAL", "STORE_ATTR", "STORE_DEREF", "IMPORT_NAME"} <= names


def test_names_beyond_the_256th_are_read() -> None:
    space: dict[str, Any] = {}
    exec("def f():\n" + "\n".join(f"    n{i}.m{i} = g{i}" for i in range(300)), space)
    told = told_in(space["f"].__code__)
    assert {("LOAD_GLOBAL", f"g{i}") for i in range(300)} <= {*told}
    assert {("STORE_ATTR", f"m{i}") for i in range(300)} <= {*told}


def compares(thing: object) -> bool:
    return thing.__module__ == "__main__" or sys.modules["".join(thing.__module__)] is None


def asks(name: str) -> object:
    return sys.modules["__main__"] if name == "__main__" else None


def keeps(name: str) -> object:
    return sys.modules[name if name != "__main__" else "__main__"]


def test_a_text_that_is_only_compared_with_leads_to_no_module() -> None:
    assert "__main__" not in imported_in(compares.__code__)
    assert "__main__" in imported_in(asks.__code__)
    assert "__main__" in imported_in(keeps.__code__)
