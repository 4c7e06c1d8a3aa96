"""Walks in C++: each kind of change is noticed while one is at work, and a walk that would miss one is not used."""

import contextlib
import sys
import types

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from ariadne.guards import at_once, versions
from ariadne.guards.at_once import Calm, changed_since
from conformance.unit.refusing import prepare_split

needs_versions = pytest.mark.skipif(versions.VERSION is None, reason="this Python has no versions of dicts")


@needs_versions
def test_this_torch_has_a_walk_that_tells():
    assert at_once._tells()


@needs_versions
@pytest.mark.parametrize("without", ["_unwritten", "_attribute", "_home"])
def test_a_walk_that_misses_a_kind_of_change_is_not_used(without, monkeypatch):
    monkeypatch.setattr(at_once, without, lambda *given: None)
    assert not at_once._tells.__wrapped__()


@needs_versions
def test_a_torch_that_has_none_or_another_form_of_it_is_done_without(monkeypatch):
    monkeypatch.setattr(at_once, "_api", types.SimpleNamespace())
    assert not at_once._tells.__wrapped__()
    monkeypatch.setattr(at_once, "_serves", at_once._tells.__wrapped__)
    assert at_once.at_once([{}], [], []) is None


def test_walks_are_made_more_rarely_where_something_is_written_now_and_then():
    calm, made = Calm(), []
    for call in range(20_000):
        if calm.lasts(call // 500):
            made.append(call)
    assert len(made) < 20
    assert made[:2] == [32, 96]


def agree(model, split, x):
    with torch.no_grad():
        assert torch.equal(split.run_suffix(split.run_prefix(x)), model(x))


def scaled(x):
    return x * 2


def scaled_otherwise(x):
    return x * 3


def with_default(x, by=4.0):
    return x * by


def closing_over(by):
    def times(x):
        return x * by

    return times


class Settings:
    def __init__(self):
        self.by = 2.0


class Asking(nn.Module):
    """What it does follows a function, a default, a variable around a function, an object, and names of a class."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.settings, self.offset = Settings(), 0.5

    def forward(self, x):
        x = self.b(with_default(scaled(self.a(x)))) + self.offset
        x = closed(x * self.settings.by)
        return x if type(self).__name__ == "Asking" else -x


closed = closing_over(3.0)


class Another(Asking):
    def forward(self, x):
        return -super().forward(x)


def anew(monkeypatch, thing, name, value):
    monkeypatch.setattr(thing, name, value)


CHANGES = {
    "a function's code": lambda m, p: anew(p, scaled, "__code__", scaled_otherwise.__code__),
    "a default": lambda m, p: anew(p, with_default, "__defaults__", (5.0,)),
    "a variable around a function": lambda m, p: anew(p, closed.__closure__[0], "cell_contents", 7.0),
    "a global": lambda m, p: anew(p, sys.modules[__name__], "scaled", scaled_otherwise),
    "the name of a class": lambda m, p: setattr(Asking, "__name__", "Other"),
    "an attribute": lambda m, p: setattr(m, "offset", 1.5),
    "an attribute of an object": lambda m, p: setattr(m.settings, "by", 3.0),
    "the dict of an object": lambda m, p: setattr(m.settings, "__dict__", {"by": 3.0}),
    "the dict of a module": lambda m, p: setattr(m, "__dict__", vars(m) | {"offset": 1.5}),
    "the class of a module": lambda m, p: setattr(m, "__class__", Another),
    "a part": lambda m, p: setattr(m, "b", nn.Sequential(m.b, nn.ReLU())),
    "a hook": lambda m, p: m.b.register_forward_hook(lambda module, args, out: out + 1),
    "a hook past its registration": lambda m, p: m.b._forward_hooks.update({0: lambda module, args, out: out + 1}),
}


@needs_versions
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_kind_of_change_is_noticed_while_a_walk_is_at_work(change, monkeypatch):
    monkeypatch.setattr(Calm, "FIRST", 2)
    torch.manual_seed(0)
    model, x = Asking().eval(), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:a")
    for _ in range(4):
        agree(model, split, x)
    variant = split._now[False]
    guards = variant.prefix_guard, variant.suffix_guard
    assert all(guard._walk is not changed_since and guard._walk() for guard in guards)
    change(model, monkeypatch)
    try:
        with contextlib.suppress(ModuleError):  # or refused by name
            agree(model, split, x)
    finally:
        Asking.__name__ = "Asking"  # which can't be taken away, as monkeypatch would


@needs_versions
def test_after_what_changes_nothing_a_walk_is_made_again(monkeypatch):
    monkeypatch.setattr(Calm, "FIRST", 2)
    model, x = Asking().eval(), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:a")
    walks = []
    for call in range(40):
        if call % 20 == 10:
            model.offset = float("0.5")
        agree(model, split, x)
        walks.append(split._now[False].suffix_guard._walk())
    assert [walks[call] for call in (9, 10, 29, 30, 39)] == [True, False, True, False, True]
