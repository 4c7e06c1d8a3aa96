"""Classes: what a class gives for a name, read without running its code, and the dicts that are written when that changes."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import takewhile
from types import MemberDescriptorType
from typing import Any
from weakref import ref

import torch
from torch import nn

from ariadne.guards.attributes import MISSING

_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # CPython's flags of classes that are made at run time, and that can't be written
# Recording puts functions of its own into these, in whichever thread it runs; none of them counts as a change.
_RECORDED = (nn.Module, torch.Tensor, torch._C.TensorBase)


def own_dict(cls: type) -> dict[str, Any]:
    """The dict behind a class's `__dict__`, whose version tells of changes; only to be read."""
    found = gc.get_referents(cls.__dict__)
    return found[0] if len(found) == 1 and type(found[0]) is dict else {}


def changeable(cls: type) -> Iterator[type]:
    """The classes in which a name may be found that another can come to stand for, nearest first."""
    return (c for c in cls.__mro__ if _is_open(c) and c not in _RECORDED)


def can_become(value: Any) -> bool:
    """Whether a thing can come to be of another class: where Python's `class` made its own."""
    return _is_open(type(value))


def _is_open(cls: type) -> bool:
    """Whether something can be put into a class: not into C's own, of which Python 3.13 makes more as it makes a user's."""
    flags = cls.__flags__
    return bool(flags & _HEAP) and not flags & _IMMUTABLE


def home_of(value: Any) -> type:
    """The class of C's that lies under a thing's class: `object` for what Python's `class` makes alone."""
    kind: Any = type(value)
    return _home_of(kind)


@lru_cache(maxsize=4096)
def _home_of(kind: Any) -> type:
    found: type = next(c for c in kind.__mro__ if not _is_pythons_make(c))
    return found


def _is_pythons_make(cls: Any) -> bool:
    """Whether a class adds nothing to its base but what Python's `class` does: attributes, slots, weak references."""
    if not cls.__flags__ & _HEAP or cls.__flags__ & _IMMUTABLE or cls.__base__ is None:
        return False
    slots = sum(type(v) is MemberDescriptorType for v in vars(cls).values())
    return bool(cls.__basicsize__ <= cls.__base__.__basicsize__ + 8 * (2 + slots))


class Lookup:
    """A class, to be asked by `[name]` for what stands there for its objects, unbound; `MISSING` where nothing does."""

    __slots__ = ("dicts", "thing")

    def __init__(self, cls: type) -> None:
        self.thing, self.dicts = cls, [own_dict(c) for c in changeable(cls)]

    def __getitem__(self, name: str) -> Any:
        return next((d[name] for d in self.dicts if name in d), MISSING)


def stands_in(module: Any, name: str) -> bool:
    """Whether an attribute stands in a module itself, or in its class, so that no `__getattr__` of its own is asked."""
    own = module.__dict__
    tables = (own, own["_parameters"], own["_buffers"], own["_modules"])
    return any(name in table for table in tables) or Lookup(type(module))[name] is not MISSING


class Owned(Lookup):
    """An object, to be asked for what stands in its own dict, or else in its class, unbound."""

    __slots__ = ()

    def __init__(self, thing: Any, own: dict[str, Any]) -> None:
        super().__init__(type(thing))
        self.thing, self.dicts = thing, [own, *self.dicts]


class Having(Lookup):
    """A class, to be asked by any key for the names that stand in it or in a base: those of `names`, or all but Python's own."""

    __slots__ = ("names",)

    def __init__(self, cls: type, names: Collection[str] | None, ignored: Collection[str]) -> None:
        super().__init__(cls)
        self.names = names, ignored

    def __getitem__(self, key: str) -> tuple[str, ...]:
        names, ignored = self.names
        there = {n for d in self.dicts for n in d if (n[:2] != "__" if names is None else n in names)}
        return tuple(sorted(there.difference(ignored)))


class Below(Lookup):
    """A class, to be asked by any key for its direct subclasses, weakly: the same tuple as long as these are the same."""

    __slots__ = ("_classes",)

    def __init__(self, cls: type) -> None:
        self.thing, self.dicts = cls, []  # no dict is written when a class comes
        self._classes: tuple[ref[type], ...] = tuple(map(ref, cls.__subclasses__()))

    def __getitem__(self, key: str) -> tuple[ref[type], ...]:
        now: list[type] = self.thing.__subclasses__()
        same = [r() for r in self._classes] == now
        return self._classes if same else tuple(map(ref, now))


class Nearer(Lookup):
    """The same, but only in the classes that are asked before the one in which the name stands now."""

    __slots__ = ()

    def __init__(self, cls: type, name: str) -> None:
        super().__init__(cls)
        self.dicts = [*takewhile(lambda d: name not in d, self.dicts)]


class Hiding(Lookup):
    """The same, but only for what comes before an object's own attribute: a property and the like."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        found = Lookup.__getitem__(self, name)
        return found if hasattr(type(found), "__set__") or hasattr(type(found), "__delete__") else MISSING
