"""What forward changes where few look: attributes of lists and arrays of classes of their own, objects in arrays, attributes of
wrapped functions, and the parts of modules. A plan puts it there, too, or it is refused by name."""

from __future__ import annotations

import collections
import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.capture import Snapshot
from ariadne.errors import UnsupportedError
from ariadne.guards import Place
from ariadne.guards.attributes import kinds_of
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(3, 4)


class History(list[Any]):
    """A list that can have attributes."""

    n = 0


class Table(dict[str, Any]):
    n = 0


class Last(collections.deque[Any]):
    n = 0


class Names(set[str]):
    n = 0


class Ordered(collections.OrderedDict[str, Any]):
    n = 0


class Array(np.ndarray):  # type: ignore[type-arg]
    n = 0


class Pair(tuple[int, int]):
    n = 0


class Tagged(str):
    n = 0


class Slotted(list[Any]):
    """A list with a slot, and no dict."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Step:
    """An object that counts how often it is called."""

    n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


class Net(nn.Module):
    """Two layers; between them it multiplies by what `asks` gives of what `make` made."""

    def __init__(self, make: Callable[[], Any], asks: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.held, vars(self)["asks"] = make(), asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        found: Tensor = self.last(h * self.asks(self, h))
        return found


def late(n: int) -> float:
    """Another number after six calls."""
    return 0.5 if n > 6 else 1.0


def counts(net: Net, h: Tensor) -> float:
    net.held.n += 1
    return late(net.held.n)


def refused(make: Callable[[], Any], asks: Callable[[Net, Tensor], Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        prepare_split(Net(make, asks), (X,), split="after:first")


MAKES: dict[str, Callable[[], Any]] = {
    "list": History,
    "dict": Table,
    "deque": Last,
    "set": Names,
    "ordered": Ordered,
    "array": lambda: np.zeros(2).view(Array),
    "tuple": lambda: Pair((1, 2)),
    "text": lambda: Tagged("x"),
    "slot": Slotted,
}


@torch.no_grad()
@pytest.mark.parametrize("name", MAKES)
def test_a_count_beside_contents_is_refused_by_name(name: str) -> None:
    refused(MAKES[name], counts, "'held' of the model, which is 1 in a first call and something else in a second")


@torch.no_grad()
@pytest.mark.parametrize("name", MAKES)
def test_what_another_puts_there_is_noticed(name: str) -> None:
    held = MAKES[name]()
    refuses_after(Net(lambda: held, lambda net, h: 1.0 + net.held.n), X, lambda: setattr(held, "n", 3))


@torch.no_grad()
@pytest.mark.parametrize("name", ["list", "dict", "set", "slot", "array"])
def test_what_each_call_puts_beside_contents_a_plan_puts_there(name: str) -> None:
    def keeps(net: Net, h: Tensor) -> float:
        net.held.n = h.sum()
        return 1.0

    model = Net(MAKES[name], keeps)
    whole = copy.deepcopy(model)
    split = prepare_split(model, (X,), split="after:first")
    for x in (X, X + 1, X - 1):
        assert torch.equal(split.run_suffix(split.run_prefix(x)), whole(x))
        assert torch.equal(model.held.n, whole.held.n)


@torch.no_grad()
def test_a_list_that_only_grows_is_followed_whatever_its_class() -> None:
    def logs(net: Net, h: Tensor) -> float:
        net.held.append(h.sum())
        return 1.0 + net.held.n

    model = Net(History, logs)
    whole = copy.deepcopy(model)
    split = prepare_split(model, (X,), split="after:first")
    for x in (X, X + 1):
        assert torch.equal(split.run_suffix(split.run_prefix(x)), whole(x))
    assert all(map(torch.equal, model.held, whole.held))
    assert len(model.held) == 2


def test_preparing_puts_back_what_stands_in_slots_of_a_list() -> None:
    model = Net(Slotted, counts)
    snapshot = Snapshot(model)
    model(X)
    snapshot.restore()
    assert model.held.n == 0


# --- objects in arrays, and what else leads to objects --------------------------------------------------------------


def in_array(net: Net, h: Tensor) -> float:
    return late(net.held[0]())


def in_square(net: Net, h: Tensor) -> float:
    net.held[1, 0].n += 1
    return late(net.held[1, 0].n)


def in_dict(net: Net, h: Tensor) -> float:
    net.held[0]["n"] += 1
    return late(net.held[0]["n"])


def square() -> Any:
    found = np.empty((2, 1), dtype=object)
    found[0, 0], found[1, 0] = Step(), Step()
    return found


def adapted(net: Net, h: Tensor) -> float:
    extra: Any = net.held.extra
    extra["step"] += 1
    return late(extra["step"])


HELD: dict[str, tuple[Callable[[], Any], Callable[[Net, Tensor], Any], str]] = {
    "object": (lambda: np.array([Step()], dtype=object), in_array, r"'held'\[0\] of the model"),
    "square": (square, in_square, r"'held'\[\(1, 0\)\] of the model"),
    "dict": (lambda: np.array([{"n": 0}], dtype=object), in_dict, r"'held'\[0\] of the model"),
    "adapter": (
        lambda: logging.LoggerAdapter(logging.getLogger("ariadne.test"), {"step": 0}),
        adapted,
        "'held'.extra of the model",
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", HELD)
def test_a_count_in_an_object_that_an_array_or_an_adapter_holds_is_refused(name: str) -> None:
    make, asks, where = HELD[name]
    refused(make, asks, f"forward changes what is in {where}, which is 1 in a first call")


@torch.no_grad()
def test_objects_in_an_array_that_forward_lets_be_are_no_obstacle() -> None:
    held = np.array([Step()], dtype=object)
    refuses_after(Net(lambda: held, lambda net, h: 1.0 + net.held[0].n), X, lambda: setattr(held[0], "n", 3))


def dispatching() -> Any:
    @functools.singledispatch
    def f(x: Any) -> int:
        found: Any = f
        found.n += 1
        return int(found.n)

    vars(f)["n"] = 0
    return f


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False])
def test_a_count_on_a_function_of_singledispatch_is_refused(inside: bool) -> None:
    def outside(net: Net, h: Tensor) -> float:
        net.held.n += 1
        return late(net.held.n)

    refused(
        dispatching,
        (lambda net, h: late(net.held(1))) if inside else outside,
        "the attributes of dispatching.f",
    )


# --- the parts of modules -------------------------------------------------------------------------------------------


def named_anew(net: Net, h: Tensor) -> float:
    net.held[str(len(net.held))] = nn.Identity()
    return late(len(net.held))


def appended(net: Net, h: Tensor) -> float:
    net.held.append(nn.Identity())
    return late(len(net.held))


def added(net: Net, h: Tensor) -> float:
    n = len([*net.children()])
    net.add_module(f"more{n}", nn.Identity())
    return late(n)


def in_a_list(net: Net, h: Tensor) -> float:
    net.held[0].append(nn.Identity())
    return late(len(net.held[0]))


PARTS: dict[str, tuple[Callable[[], Any], Callable[[Net, Tensor], Any], str]] = {
    "ModuleDict": (nn.ModuleDict, named_anew, "the parts of 'held'"),
    "ModuleList": (nn.ModuleList, appended, "the parts of 'held'"),
    "add_module": (dict, added, "the parts of the model"),
    "in a list": (lambda: [nn.Sequential()], in_a_list, r"the parts of 'held\[0\]'"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_each_call_adds_are_refused(name: str) -> None:
    make, asks, where = PARTS[name]
    refused(make, asks, f"forward changes what is in {where}, which changes in another way at each call")


@torch.no_grad()
def test_a_part_that_a_first_call_makes_is_no_obstacle() -> None:
    def once(net: Net, h: Tensor) -> Tensor:
        if "cut" not in net.held:
            net.held["cut"] = nn.Hardtanh(max_val=0.1)
        found: Tensor = net.held["cut"](h)
        return found

    model = Net(nn.ModuleDict, once)
    split = prepare_split(model, (X,), split="after:first")
    assert torch.equal(split.run_suffix(split.run_prefix(X + 1)), copy.deepcopy(model)(X + 1))


# --- places ---------------------------------------------------------------------------------------------------------


def test_kinds_tell_contents_from_attributes() -> None:
    assert [kinds_of(one) for one in ([], {}, (), 1, Step())] == [("list",), ("dict",), (), (), ("object",)]
    assert kinds_of(History()) == kinds_of(Slotted()) == ("list", "object")
    assert (kinds_of(Ordered()), kinds_of(Pair((1, 2))), kinds_of(Tagged("x"))) == (
        ("dict", "object"),
        ("object",),
        ("object",),
    )
    assert kinds_of(functools.partial(int)) == ("object",)


def test_places_stand_in_others() -> None:
    inner = Place("held", "", ("a", 0, "b"))
    assert inner.above([]) == Place("held", "", ("a", 0))
    assert Place("held", "", ()).below("a") == Place("held", "", ("a",))
    assert Place("held", "m", ("_modules",)).words("x") == "the part 'x' of 'm'"
