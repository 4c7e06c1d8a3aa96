"""What forward learns from Python's own modules: which warnings are errors, and what counts as of an abstract class."""

from __future__ import annotations

import abc
import collections.abc
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import pytest
import torch

from ariadne.errors import ModuleError
from ariadne.guards import switches
from ariadne.guards.outside import Kinds
from conformance.unit.guards.test_first_calls import Net, X, call
from conformance.unit.refusing import prepare_split


def raises(m: Any) -> int:
    try:
        warnings.warn("told", UserWarning, stacklevel=2)
    except UserWarning:
        return 2
    return 1


def raises_explicitly(m: Any) -> int:
    try:
        warnings.warn_explicit("told", UserWarning, "here", 1, registry={})
    except UserWarning:
        return 2
    return 1


def counts(m: Any) -> int:
    return 1 + len(warnings.filters)


def records(m: Any) -> int:
    with warnings.catch_warnings(record=True) as found:
        warnings.warn("told", UserWarning, stacklevel=2)
    return 1 + len(found)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("asks", "now"), [(raises, "error"), (raises_explicitly, "error"), (counts, "always"), (records, "always")]
)
def test_filters_for_warnings_that_forward_learns_of_are_followed(asks: Callable[[Any], int], now: Any) -> None:
    split = prepare_split(Net(asks), (X,), split="after:first")
    assert torch.equal(before := call(split), split.model(X))
    warnings.filterwarnings(now, "told")
    assert torch.equal(after := call(split), split.model(X))
    assert not torch.equal(before, after)


@torch.no_grad()
@pytest.mark.usefixtures("quiet")
def test_a_filter_that_makes_no_error_calls_for_no_new_plan() -> None:
    split = prepare_split(Net(raises), (X,), split="after:first")
    warnings.filterwarnings("ignore", "other")
    assert torch.equal(call(split), split.model(X))
    assert len(split.plans) == 1


class Kind(abc.ABC):  # noqa: B024  # others are registered with it
    """What others may be registered with."""


def of_kind(m: Any) -> int:
    return 2 if isinstance(m.kept, Kind) else 1


def below_kind(m: Any) -> int:
    return 2 if issubclass(type(m.kept), Kind) else 1


def a_sequence(m: Any) -> int:
    return 2 if isinstance(m.kept, collections.abc.Sequence) else 1


def asked_of(asks: Callable[[Any], int]) -> None:
    class Thing:
        pass

    model = Net(asks)
    model.kept = Thing()
    split = prepare_split(model, (X,), split="after:first")
    assert torch.equal(call(split), model(X))
    (collections.abc.Sequence if asks is a_sequence else Kind).register(Thing)  # type: ignore[attr-defined]
    with pytest.raises(ModuleError, match=r"whether a .*Thing is a (Kind|Sequence) was False"):
        call(split)


@torch.no_grad()
@pytest.mark.parametrize("asks", [of_kind, below_kind, a_sequence])
def test_a_class_that_was_registered_with_an_abstract_one_is_noticed(asks: Callable[[Any], int]) -> None:
    asked_of(asks)


@runtime_checkable
class Runs(Protocol):
    """What a thing has to hold."""

    def run(self) -> int: ...


@runtime_checkable
class HasScale(Protocol):
    """An attribute that a thing has to hold; such a protocol can't be asked of a class."""

    scale: float


class Thing:
    """What may hold it."""


CAME_AND_WENT: dict[str, tuple[type, str]] = {"a method": (Runs, "run"), "a number": (HasScale, "scale")}


@torch.no_grad()
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("what", sorted(CAME_AND_WENT))
def test_what_a_thing_comes_to_hold_or_loses_counts_for_a_protocol(what: str, there: bool, copied: bool) -> None:
    protocol, name = CAME_AND_WENT[what]
    model = Net(lambda m: 2 if isinstance(m.kept, protocol) else 1)
    model.kept = Thing()
    if there:
        setattr(model.kept, name, int)
    split = prepare_split(model, (X,), split="after:first")
    split = copy.deepcopy(split) if copied else split
    assert torch.equal(call(split), split.model(X))
    if there:
        delattr(split.model.kept, name)
    else:
        setattr(split.model.kept, name, int)
    with pytest.raises(ModuleError):
        call(split)


@torch.no_grad()
@pytest.mark.usefixtures("quiet")
def test_guards_that_keep_to_the_first_answer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kinds, "__getitem__", lambda self, kind: False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        asked_of(of_kind)
    for name in ("_BY_FUNCTION", "_BY_CODE"):
        known = {key: value for key, value in getattr(switches, name).items() if "warning" not in value}
        monkeypatch.setattr(switches, name, known)
    with pytest.raises(AssertionError):
        test_filters_for_warnings_that_forward_learns_of_are_followed(raises, "error")
