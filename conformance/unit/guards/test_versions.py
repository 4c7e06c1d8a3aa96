"""Versions of dicts: one that misses a write is not trusted; where only the filling of an empty dict is missed, lengths tell."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError
from ariadne.guards import kept, versions, watched
from ariadne.guards.kept import Contents, Members
from ariadne.guards.versions import stamp, tells, trusted
from ariadne.runtime import told
from ariadne.stopped import laid
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers


def frozen(d: Any) -> int:
    return 1


def blind(d: Any) -> int:
    return len(d)


class SilentFills:
    """What torch gives under Python 3.12, and worse: a dict that was empty keeps its version, however it is filled."""

    def __init__(self, at_least: int = 1) -> None:
        self.at_least = at_least  # how many entries at once are passed over
        self.known: dict[
            int, tuple[Any, int, int, int]
        ] = {}  # the dict, its length, its version, and how much is left out

    def __call__(self, d: Any) -> int:
        true = TRUE(d)
        _, length, before, left_out = self.known.get(id(d), (d, len(d), true, 0))
        if not length and len(d) >= self.at_least:
            left_out += true - before
        self.known[id(d)] = d, len(d), true, left_out
        return true - left_out


TICKS = itertools.count()
TRUE: Any = versions.dict_version


@pytest.mark.parametrize("version", [frozen, blind, lambda d: next(TICKS), SilentFills(), SilentFills(2)])
def test_a_version_that_misses_a_write_or_changes_without_one_is_not_trusted(version: Callable[[Any], int]) -> None:
    assert not tells(version)


def test_versions_are_told_on_the_pythons_that_have_them() -> None:
    # CPython 3.13 writes attributes past the dict, whose version stays: there all is compared at each call, which takes longer.
    # Without the length there would be none on 3.12 either, and no answer would be wrong: only the time tells.
    if sys.version_info < (3, 13):
        assert versions.VERSION is not None
    elif sys.version_info < (3, 14):
        assert versions.VERSION is None


@pytest.fixture(params=[True, False], ids=["with lengths", "alone"])
def with_lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """An interpreter that keeps silent where an empty dict is filled; Ariadne asks for lengths, or is made to do without."""
    monkeypatch.setattr(versions, "dict_version", SilentFills())
    version = versions._with_length if request.param else versions.dict_version
    rooms = [module for name, module in sys.modules.items() if name.startswith("ariadne.")]
    asking = [module for module in rooms if getattr(module, "VERSION", 0) is versions.VERSION]
    assert {watched, kept, told, laid, versions} <= {*asking}
    for module in asking:
        monkeypatch.setattr(module, "VERSION", version)
    monkeypatch.setattr(versions, "BY_LENGTH", request.param)
    return bool(request.param)


@pytest.mark.parametrize(
    ("version", "by"), [(SilentFills(), "_with_length"), (SilentFills(2), "_with_length"), (frozen, "")]
)
def test_lengths_are_asked_for_where_versions_alone_tell_too_little(
    version: Any, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by and versions.VERSION is None:
        pytest.skip("this Python has no versions of dicts")
    monkeypatch.setattr(versions, "dict_version", version)
    found = trusted()
    assert found is (getattr(versions, by) if by else None)


WRITES: dict[str, Callable[[dict[Any, Any], dict[Any, Any]], Any]] = {
    "filled": lambda empty, full: empty.update({"a": 1, "b": 2}),
    "filled as the other loses as much": lambda empty, full: (empty.update({"a": 1}), full.pop("x")),
    "filled as the other is emptied": lambda empty, full: (empty.update(full), full.clear()),
    "filled, emptied and filled": lambda empty, full: (
        empty.update(full),
        empty.clear(),
        empty.update({"z": 1, "y": 2}),
    ),
    "emptied and filled with as many": lambda empty, full: (full.clear(), full.update({"x": 3, "y": 2})),
    "one entry changed": lambda empty, full: full.update(x=3),
}


@pytest.mark.parametrize("name", WRITES)
def test_one_number_for_many_dicts_tells_each_write(name: str, with_lengths: bool) -> None:
    empty: dict[Any, Any] = {}
    full: dict[Any, Any] = {"x": 1, "y": 2}
    before = stamp([empty, full])
    assert stamp([empty, full]) == before
    WRITES[name](empty, full)
    assert (stamp([empty, full]) > before) == (with_lengths or not name.startswith("filled") or "other" in name)


@pytest.mark.parametrize("kind", [Contents, Members])
def test_a_dict_that_is_filled_holds_something_else(kind: Any, with_lengths: bool) -> None:
    thing: dict[str, float] = {}
    held = kind(thing)
    assert held.is_same()
    thing.update(a=1.0)
    assert held.is_same() != with_lengths
    thing.clear()
    assert held.is_same()


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.rest = nn.Conv1d(3, 3, 3, padding=1), nn.Tanh(), nn.Linear(4, 4)
        self.table: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.act(self.conv(x)) * self.table.get("scale", 1.0) * getattr(self.act, "weight", 1.0))


FILLS: dict[str, Callable[[Any], Any]] = {
    "a dict that forward reads": lambda m: m.table.update(scale=2.0),
    "a table without parameters": lambda m: m.act._parameters.update(weight=nn.Parameter(torch.tensor(2.0))),
    "a table without buffers": lambda m: m.act._buffers.update(weight=torch.tensor(2.0)),
    "a table without members": lambda m: m.act._modules.update(weight=nn.Identity()),
    "hooks": lambda m: m.act._forward_hooks.update({0: lambda module, args, out: out * 2}),
}

UNTOLD = ("a dict that forward reads", "a table without parameters", "a table without buffers")


def replayed(runtime: SplitRuntime, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return runtime.run_suffix(runtime.run_prefix(x))


@pytest.mark.parametrize("name", FILLS)
def test_what_fills_an_empty_dict_of_a_model_is_seen(name: str, with_lengths: bool) -> None:
    torch.manual_seed(0)
    runtime, x = prepare_split(Looks().eval(), (numbers(2, 3, 4),), split="after:conv"), numbers(3, 3, 4)
    expected = replayed(runtime, x)
    assert torch.equal(replayed(runtime, x), expected)
    FILLS[name](runtime.model)
    if not with_lengths and name in UNTOLD:
        assert torch.equal(replayed(runtime, x), expected)  # wrong: what lengths are there for
        return
    for who in (runtime, copy.deepcopy(runtime)):
        with pytest.raises(ModuleError):
            replayed(who, x)


def test_tables_that_are_filled_are_laid_out_anew(with_lengths: bool) -> None:
    model = Looks()
    tables = laid.Laid()
    assert tables.tables(model) is tables.tables(model)
    before = len(tables.tables(model)[2].tensors)
    model.act._buffers.update(weight=torch.ones(1))
    assert len(tables.tables(model)[2].tensors) == before + 1, (
        "an empty table is looked at itself, whatever versions tell"
    )
