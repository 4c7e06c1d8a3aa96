"""What a first call leaves behind decides what later ones find: in keys and nesting, in containers, functions and tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ariadne import SplitSpec
from ariadne.errors import ModuleError
from ariadne.guards.told import agree, entries_agree, told_of, without_content
from conformance.unit.guards.test_first_calls import Net, X, call, split_of
from conformance.unit.refusing import prepare_split

KEPT_BY_ALL: dict[str, float] = {}


def trains(m: Any) -> bool:
    return bool(m.first.weight.requires_grad)


def kept(make: Callable[[bool], Any], ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What forward asks of something that it makes at its first call."""

    def asks(m: Any) -> Any:
        if m.kept is None:
            m.kept = make(trains(m))
        return ask(m.kept)

    return asks


def in_its_table(m: Any) -> Any:
    if not m.table:
        m.table["a" if trains(m) else "b"] = 1.0
    return 2 if "a" in m.table else 1


def in_a_global(m: Any) -> Any:
    if "factor" not in KEPT_BY_ALL:
        KEPT_BY_ALL["factor"] = 2.0 if trains(m) else 1.0
    return KEPT_BY_ALL["factor"]


def in_a_set(m: Any) -> Any:
    if not m.names:
        m.names.add("a" if trains(m) else "b")
    return 2 if "a" in m.names else 1


@functools.cache
def remembered(m: Any) -> float:
    return 2.0 if trains(m) else 1.0


def left_or_not(m: Any) -> Any:
    if m.kept is None and trains(m):
        m.kept = 2.0
    return 1.0 if m.kept is None else m.kept


ASKS: dict[str, Callable[[Any], Any]] = {
    "keys": kept(lambda t: {"a" if t else "b": 1.0}, lambda v: 2 if "a" in v else 1),
    "members": kept(lambda t: {"a" if t else "b"}, lambda v: 2 if "a" in v else 1),
    "nesting": kept(lambda t: [[1.0, 2.0], [3.0]] if t else [[1.0], [2.0, 3.0]], lambda v: sum(v[0])),
    "an object": kept(lambda t: types.SimpleNamespace(v=2.0 if t else 1.0), lambda v: v.v),
    "a function": kept(lambda t: (lambda: 2.0) if t else (lambda: 1.0), lambda v: v()),
    "what a function closes over": kept(lambda t: lambda: 2.0 if t else 1.0, lambda v: v()),
    "a tensor": kept(lambda t: torch.ones(4) * (2.0 if t else 1.0), lambda v: v),
    "the model's table": in_its_table, "its set": in_a_set, "a global": in_a_global, "a function's memory": lambda m: remembered(m),
    "nothing": left_or_not,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ASKS)
def test_a_plan_that_would_have_left_something_else_is_refused_after_another_first_call(name: str) -> None:
    KEPT_BY_ALL.clear()
    model = Net(ASKS[name])
    model.names = set[str]()  # type: ignore[assignment]
    split = prepare_split(model, (X,), split=SplitSpec("after:first", dynamic_batch=(1, 4), trainable=False))
    call(split)
    model.first.weight.requires_grad_(False)
    with pytest.raises(
        ModuleError, match=r"at its first call, and keeps it: by .*, where the first call of this plan would"
    ):
        call(split)


@torch.no_grad()
@pytest.mark.parametrize("name", ["keys", "a tensor", "the model's table", "a function's memory", "nothing"])
def test_what_a_call_of_the_model_itself_left_is_followed(name: str) -> None:
    split = split_of(ASKS[name])
    split.model(X)
    split.model.first.weight.requires_grad_(False)
    assert torch.equal(call(split), split.model(X))


def test_caches_that_hold_something_for_each_size_or_type_are_let_be() -> None:
    size = {told_of(4): 1.0}, {told_of(6): 2.0}
    kinds = {told_of(("a", torch.float32)): 1.0}, {told_of(("a", torch.float64)): 2.0}
    words = {told_of("4x4"): 1.0}, {told_of("6x4"): 2.0}
    for one, other in (size, kinds, words):
        assert entries_agree(one, other, True, of_both=False)
        assert entries_agree(one, other, False, of_both=False)
    assert not entries_agree({"a": 1.0}, {"b": 1.0}, True, of_both=False), "a name is no size"
    assert not entries_agree({"a": 1.0}, {"a": 2.0}, True, of_both=True)
    assert entries_agree({"a": 1.0}, {"b": 1.0}, True, of_both=True), "a function is asked for each by itself"


def test_what_is_told_of_tensors_is_their_content_where_that_follows_nothing() -> None:
    ones, twos, more = told_of([torch.ones(4)]), told_of([torch.ones(4) * 2]), told_of([torch.ones(5)])
    assert not agree(ones, twos, True)
    assert not agree(ones, told_of([torch.ones(4).double()]), True)
    assert agree(ones, more, True), "of two sizes nothing is said"
    assert agree(ones, twos, False), "it may follow the batch"
    assert agree(without_content(ones), twos, True), "it follows a weight"
    assert not agree(told_of([1.0]), told_of([1]), True)
    assert not agree(told_of({"a"}), told_of({"b"}), False)
    ring: list[Any] = []
    ring.append(ring)
    assert told_of(ring)
    assert told_of(torch.eye(2).to_sparse())
    assert told_of([*range(9999)])


@torch.no_grad()
@pytest.mark.planted
@pytest.mark.parametrize("name", ["keys", "nesting", "the model's table", "a tensor"])
def test_a_plan_that_does_not_tell_keys_nesting_or_content_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat(value: Any) -> Any:
        found = told_of(value)
        return (
            (found[0], len(found)) if type(found) is tuple else (value if type(value) is not torch.Tensor else "tensor")
        )

    monkeypatch.setattr("ariadne.capture.filled.told_of", flat if name != "the model's table" else told_of)
    monkeypatch.setattr("ariadne.capture.filled.told_entries", lambda found: dict.fromkeys(range(len(found)), 1.0))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_plan_that_would_have_left_something_else_is_refused_after_another_first_call(name)
