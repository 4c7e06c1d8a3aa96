"""What stands for an attribute, found without running code: as Python's own slow way has it."""

from __future__ import annotations

import collections
import enum
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.guards.attributes import MISSING
from ariadne.guards.links import static


class Slotted:
    __slots__ = ("__dict__", "a")


class Hidden:
    __dict__ = {"a": 5}  # type: ignore[assignment]


class Answers:
    y = 3

    @property
    def x(self) -> int:
        return 1

    def __getattr__(self, name: str) -> int:
        return 1


class Meta(type):
    z = 1


class OfMeta(metaclass=Meta):
    a = 2


class Keyed(dict[str, int]):
    pass


class Kind(enum.Enum):
    a = 1


def beside() -> Answers:
    """One whose class has what it has itself."""
    made = Answers()
    vars(made).update(x=3, y=4, w=5)
    return made


THINGS = [
    1, None, "a", Slotted(), Hidden(), Answers(), beside(), OfMeta(), OfMeta, Answers, int, type, object, Keyed(a=1), Kind.a, Kind,
    torch, nn.Linear(2, 2), nn.Linear, nn.Sequential(nn.ReLU()), torch.zeros(1), functools.partial(int), len, [], (1,),
    collections.OrderedDict(a=1), Answers().__getattr__,
]  # fmt: skip
NAMES = "a x y z w weight in_features forward append func __dict__ __class__ __doc__ __mro__ __getattr__ name value nn".split()


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_what_stands_for_an_attribute_is_what_python_finds(thing: Any) -> None:
    for name in NAMES:
        there, found = inspect.getattr_static(thing, name, MISSING), static(thing, name)
        assert found is there or found == there, name
