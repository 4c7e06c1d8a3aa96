"""Trap 24: containers come back as what they were."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ariadne import prepare_split
from ariadne.errors import UnsupportedError
from conformance.unit.trap_nets import Box
from conformance.unit.trap_twins import Twins, same, seeded


class Named(NamedTuple):
    first: Any
    second: Any


Plain = namedtuple("Plain", "b a")


@dataclasses.dataclass
class Data:
    z: Any
    a: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    rest: Any = dataclasses.field(default=None, kw_only=True)


class Keyed(dict):  # type: ignore[type-arg]
    """A dict of its own kind."""


def model_output(x: torch.Tensor, y: torch.Tensor) -> Any:
    return BaseModelOutputWithPooling(pooler_output=y, last_hidden_state=x, hidden_states=(x, y))


CONTAINERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda x, y: (x, y),
    "tuple of one": lambda x, y: (x + y,),
    "list": lambda x, y: [x, y],
    "empty ones": lambda x, y: (x, y, [], (), {}),
    "NamedTuple": Named,
    "namedtuple": lambda x, y: Plain(x, y),
    "dataclass": lambda x, y: Data(x, y),
    "frozen dataclass": lambda x, y: Frozen(x, rest=[y]),
    "ModelOutput": model_output,
    "dict order": lambda x, y: {"z": x, "a": y, "m": x},
    "dict of other keys": lambda x, y: {3: x, (1, 2): y, None: 1},
    "OrderedDict": lambda x, y: OrderedDict([("z", x), ("a", y)]),
    "defaultdict": lambda x, y: defaultdict(list, {"z": x, "a": [y]}),
    "nested": lambda x, y: {"z": [Named(x, (y, Data(x, None)))], "a": {"k": (1, "s", 2.5, True, None)}},
    "a size": lambda x, y: (x, y.shape, y.shape[0], tuple(y.shape)),
    "return_types": lambda x, y: (x.max(1), y.topk(2), torch.sort(x)),
    "one tensor twice": lambda x, y: (x, y, x),
    "numbers": lambda x, y: (x, y, 3, 2.5, True, None, "s", 1j, x.dtype, x.device),
    "an input": lambda x, y: (x, y),
}

FOREIGN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "Keyed": lambda x, y: Keyed(z=x, a=y),
    "slice": lambda x, y: (x, y, slice(1, None)),
    "set": lambda x, y: (x, y, {1, 2}),
    "range": lambda x, y: (x, y, range(x.shape[0])),
    "Box": lambda x, y: (x, y, Box()),
}


class Contained(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap, self.a, self.b = wrap, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.a(x))
        return self.wrap(y, self.b(y))


def shape_of(value: Any) -> Any:
    """Types, keys and their order, and what is the same object as what, all the way down; no walker of Ariadne's."""
    ids: dict[int, int] = {}

    def walk(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return ("tensor", ids.setdefault(id(v), len(ids)))
        if isinstance(v, dict):
            extra = v.default_factory if isinstance(v, defaultdict) else None
            return (type(v), [(k, walk(x)) for k, x in v.items()], extra)
        if dataclasses.is_dataclass(v):
            return (type(v), [(f.name, walk(getattr(v, f.name))) for f in dataclasses.fields(v)])
        if isinstance(v, (list, tuple)):
            return (type(v), [walk(x) for x in v])
        return (type(v), v)

    return walk(value)


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_output_comes_back_in_the_container_it_had(container: str) -> None:
    twins = Twins(lambda: Contained(CONTAINERS[container]), seeded((2, 6)))
    for runtime in twins.cuts():
        for b in (1, 3):
            with torch.no_grad():
                want = twins.whole(seeded((b, 6)))
            got = runtime.run_suffix(runtime.run_prefix(seeded((b, 6))))
            assert shape_of(want) == shape_of(got)
    twins.hold(6, batches=(1, 3))


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_output_that_no_plan_can_hold_is_refused_by_its_type(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"forward returns an object of type {kind}"):
        prepare_split(Contained(FOREIGN[kind]), (seeded((2, 6)),), split="50%")


class Unwraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Any, extra: Any = None) -> Any:
        x, y = given.values() if isinstance(given, dict) else given
        return self.b(torch.tanh(self.a(x)) + y) * (2 if extra is None else extra["k"][0])


@dataclasses.dataclass
class Given:
    x: torch.Tensor
    y: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.x, self.y))


class UnwrapsFields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Given) -> Any:
        return self.b(torch.tanh(self.a(given.x)) + given.y)


INPUT_CONTAINERS: dict[str, Callable[..., Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "NamedTuple": Named,
    "dict": lambda x, y: {"z": x, "a": y},
    "OrderedDict": lambda x, y: OrderedDict(z=x, a=y),
}


@pytest.mark.parametrize("wrap", INPUT_CONTAINERS.values(), ids=INPUT_CONTAINERS)
def test_an_input_may_come_in_a_container(wrap: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Unwraps()
    runtime = prepare_split(model, (wrap(seeded((2, 6)), seeded((2, 6), 2)),), split="50%")
    for b in (1, 3):
        given = wrap(seeded((b, 6)), seeded((b, 6), 2))
        with torch.no_grad():
            want = model(given)
        for candidate in runtime.candidates:
            cut = runtime.resplit(candidate)
            same(want, cut.run_suffix(cut.run_prefix(given)))


def test_an_input_may_come_in_a_dataclass() -> None:
    model = UnwrapsFields()
    runtime = prepare_split(model, (Given(seeded((2, 6)), seeded((2, 6), 2)),), split="50%")
    given = Given(seeded((3, 6)), seeded((3, 6), 2))
    with torch.no_grad():
        same(model(given), runtime.run_suffix(runtime.run_prefix(given)))
