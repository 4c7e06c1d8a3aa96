"""Objects among inputs and results are rebuilt from what they have: their class is not called again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput

from ariadne import prepare_split, tree
from ariadne.errors import UnsupportedError
from conformance.unit.trap_kit import numbers


@dataclass
class Rows:
    y: Tensor
    n: int = 0

    def __post_init__(self) -> None:
        self.n += len(self.y)
        self.y = self.y[1:]


@dataclass(slots=True)
class Slotted:
    y: Tensor
    n: int = 0

    def __post_init__(self) -> None:
        assert self.y.ndim == 2
        self.n, self.y = self.n + 1, self.y / 2


@dataclass(frozen=True)
class Frozen:
    y: Tensor
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.y * 2)
        object.__setattr__(self, "y", self.y + 1)


@dataclass(init=False)
class OwnInit:
    y: Tensor

    def __init__(self, raw: Tensor) -> None:
        self.y = raw * 3


@dataclass
class Raw:
    raw: InitVar[Tensor]
    y: Tensor = field(init=False)

    def __post_init__(self, raw: Tensor) -> None:
        self.y = raw - 1


@dataclass
class Output(ModelOutput):
    y: Tensor | None = None
    z: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self["y"] = self.y / 2
        self.aux = self.y * 3


class Pair(NamedTuple):
    y: Tensor
    n: int


class Shorter(Pair):
    def __new__(cls, y: Tensor, n: int = 0) -> Any:
        return super().__new__(cls, y[1:] if y.shape[0] > 2 else y, n + 1)


class Kind(Enum):
    SMALL, LARGE = 1, 2


@dataclass
class Odd:
    """Beside its field it has what is one and the same for all, and what each has of its own."""

    y: Tensor
    number: int = 1

    def __post_init__(self) -> None:
        self.kind, self.number = Kind(self.number), 2
        self.y, self.dtype, self.inner = self.y / 100, self.y.dtype, Frozen(self.y)
        self.lock, self.kinds = threading.Lock(), {Kind.SMALL}


class Items(list):  # type: ignore[type-arg]
    def __init__(self, y: Tensor) -> None:
        super().__init__([y, y * 2])


class Both(tuple):  # type: ignore[type-arg]
    __slots__ = ()

    def __new__(cls, y: Tensor) -> Any:
        return super().__new__(cls, (y, Items(y)))


class Net(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.a, self.b, self.wrap = nn.Linear(4, 4), nn.Linear(4, 4), wrap

    def forward(self, given: Any) -> Any:
        x = given if isinstance(given, Tensor) else given[0] if isinstance(given, (Items, Both)) else given.y
        return self.wrap(self.b(self.a(x).relu()))


def told(value: Any) -> Any:
    """All that an object has, in its own slots, items and `__dict__`; no walker of Ariadne's."""
    if isinstance(value, Tensor):
        return value.shape, value.flatten().tolist()
    own = [*getattr(value, "__dict__", {}).items()]
    own += [(n, getattr(value, n)) for n in getattr(type(value), "__slots__", ())]
    items = [*value.items()] if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    known = value if isinstance(value, (int, str, Enum, torch.dtype)) else None
    return (
        type(value),
        known,
        [told(v) for v in items],
        sorted((n, told(v)) for n, v in own if not isinstance(value, Enum)),
    )


ALL = [Rows, Slotted, Frozen, OwnInit, Raw, Output, Shorter, Odd, Items, Both]


@pytest.mark.parametrize("cls", ALL)
def test_a_result_has_what_it_had_and_its_class_is_not_called_again(cls: Any) -> None:
    model = Net(cls).eval()
    split = prepare_split(model, (numbers(2, 4),), split="after:a")
    for batch in (2, 3):
        x = numbers(batch, 4)
        with torch.no_grad():
            assert told(model(x)) == told(split.run_suffix(split.run_prefix(x)))


@pytest.mark.parametrize("cls", ALL)
def test_an_input_is_rebuilt_with_what_it_had(cls: Any) -> None:
    model = Net().eval()
    split = prepare_split(model, (cls(numbers(2, 4)),), split="after:a")
    for batch in (2, 3):
        with torch.no_grad():
            want = model(cls(numbers(batch, 4)))
        assert torch.equal(want, split.run_suffix(split.run_prefix(cls(numbers(batch, 4)))))


def test_each_result_has_a_lock_of_its_own() -> None:
    split = prepare_split(Net(Odd).eval(), (numbers(2, 4),), split="after:a")
    one, other = (split.run_suffix(split.run_prefix(numbers(2, 4))) for _ in range(2))
    assert one.lock is not other.lock
    assert one.kinds is not other.kinds


@dataclass
class Logits:
    y: Tensor

    @functools.cached_property
    def probs(self) -> Tensor:
        return self.y.softmax(-1)


def read(y: Tensor) -> Logits:
    found = Logits(y)
    assert found.probs is not None
    return found


def test_what_a_cached_property_left_on_a_result_stays() -> None:
    model, x = Net(read).eval(), numbers(3, 4)
    split = prepare_split(model, (x,), split="after:a")
    with torch.no_grad():
        found = [model(x), split.run_suffix(split.run_prefix(x))]
        for one in found:
            one.y.mul_(3)
    assert torch.equal(found[0].probs, found[1].probs)


def test_leaves_are_mapped_with_what_a_cached_property_made_where_that_is_asked() -> None:
    given = read(numbers(2, 4))
    assert tree.map_leaves(lambda t: t, given, cached=True).__dict__ == given.__dict__
    assert "probs" not in tree.map_leaves(lambda t: t, given).__dict__


@dataclass
class Registered:
    y: Tensor

    def __post_init__(self) -> None:
        self.y = self.y / 2


def test_a_dataclass_that_torch_knows_by_its_fields_is_not_made_again_either() -> None:
    torch_pytree.register_dataclass(Registered)
    try:
        model, x = Net(Registered).eval(), numbers(2, 4)
        split = prepare_split(model, (x,), split="after:a")
        with torch.no_grad():
            assert torch.equal(model(x).y, split.run_suffix(split.run_prefix(x)).y)
    finally:
        torch_pytree._deregister_pytree_node(Registered)


class Boxes(list):  # type: ignore[type-arg]
    """A list with something beside its items."""

    def __init__(self, y: Tensor) -> None:
        super().__init__([y])
        self.size = 3


class Attributes(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("make", [Boxes, lambda y: Attributes(y=y)], ids=["Boxes", "Attributes"])
def test_a_container_with_more_than_its_items_is_refused_by_name(make: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"forward returns an object of type (Boxes|Attributes), which is neither"
    ):
        prepare_split(Net(make), (numbers(2, 4),), split="after:a")


def test_an_object_that_no_result_can_have_is_refused_by_name() -> None:
    def wrap(y: Tensor) -> OwnInit:
        found = OwnInit(y)
        found.lock = threading.Lock()  # type: ignore[attr-defined]
        return found

    with pytest.raises(
        UnsupportedError, match=r"returns a OwnInit on which 'lock' stands.*a call of OwnInit with its fields raises"
    ):
        prepare_split(Net(wrap), (numbers(2, 4),), split="after:a")


def test_objects_beside_fields_are_carried_and_make_no_two_calls_differ() -> None:
    one, other = Odd(numbers(2, 4)), Odd(numbers(2, 4))
    leaves, spec = tree.flatten(one)
    assert spec == tree.flatten(other)[1]
    assert tree.unflatten(leaves, spec).lock is one.lock


def test_a_dict_like_result_keeps_its_nones_and_what_stands_beside_its_items() -> None:
    given = BaseModelOutputWithPooling(pooler_output=numbers(2), hidden_states=(numbers(1),))
    given.aux = numbers(3)  # type: ignore[attr-defined]
    found = tree.unflatten(*tree.flatten(given))
    assert told(found) == told(given)
    assert str(tree.flatten(given)[1]).endswith("'__dict__': {'aux': *})")
