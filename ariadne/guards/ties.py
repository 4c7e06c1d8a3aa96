"""Ties: which tensors in containers and objects are which of the model's own, and of each other, where forward compares by that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import nn

from ariadne.guards.attributes import LEAVES, MISSING, held, is_a, shown
from ariadne.guards.contents import members_of
from ariadne.guards.kept import Kept, registries_of
from ariadne.guards.outside import Outside
from ariadne.guards.versions import VERSION, stamp

_MOST = 1 << 18  # so many things are looked at, numbers and texts not counted
_PLAIN = LEAVES - {torch.Tensor, nn.Parameter}
_IDS = 1 << 20  # a smaller number is no id of a thing
Root = tuple[str, str] | Outside  # a module's path and an attribute of it; or something outside of the model


class Tied(Kept):
    """Which tensor each is that stands in something that forward read, by the first name that it has.

    Those in sets and among keys, and numbers that are ids of the model's tensors, too. `always`: they stand where nothing but which
    one it is can be asked.
    """

    __slots__ = ("always", "filled", "roots", "tables", "things", "total")

    def __init__(self, thing: nn.Module, roots: Iterable[Root]) -> None:
        self.roots, self.always, self.total = list(roots), False, -1
        self.things: list[Any] = []
        self.tables = registries_of(thing)
        self.filled = [table for _, table in self.tables if table]
        super().__init__(thing)
        self.roots = [
            r for r in self.roots if any(True for _ in self._of(thing, r))
        ]  # only those are looked into at calls

    def look(self, thing: Any) -> dict[str, Any]:
        """By where it stands, the first place that holds the same one."""
        first: dict[int, str] = {}
        for path, table in self.tables:
            for key, t in table.items():
                if t is not None:
                    first.setdefault(id(t), f"{path}.{key}".lstrip("."))
        found: dict[str, Any] = {}
        for label, one, by_which in self._all(thing):
            self.always |= by_which
            if is_a(one, (set, frozenset)):
                found[label] = sorted(first.get(id(t), "") for t in members_of(one) if is_a(t, torch.Tensor))
            elif is_a(one, torch.Tensor):
                found[label] = first.setdefault(id(one), label)
            elif one in first:
                found[label] = first[one]
        return found

    def words(self, held: dict[str, Any]) -> str:
        """Those that are not alike in the two."""
        other = self.look(self.thing) if held is self.held else self.held
        told = (f"{at} = {is_so}" for at, is_so in held.items() if other.get(at, MISSING) != is_so)
        return ", ".join([*told][:4]) or "none besides"

    def is_same(self) -> bool:
        """Whether what stood there is the same still; of what came, others say so."""
        now = self.look(self.thing)
        return all(now.get(at, MISSING) == is_so for at, is_so in self.held.items())

    def asked(self) -> bool:
        """The same, for a call: looked up anew where a registry was written, or another thing stands somewhere."""
        total, things = stamp(self.filled), list[Any]()
        for _, one, _ in self._all(self.thing):
            things += sorted(members_of(one), key=id) if is_a(one, (set, frozenset)) else (one,)
        same = VERSION is not None and total == self.total and len(things) == len(self.things)
        if same and all(map(is_, things, self.things)):
            return True
        if not self.is_same():
            return False
        self.total, self.things = total, things
        return True

    def anew(self, thing: Any) -> Kept:
        """The same of another model: a copy may hold the tensors of the original, and then it is not the same."""
        copied = type(self)(thing, self.roots)
        copied.held = self.held
        return copied

    def _all(self, thing: nn.Module) -> Iterator[tuple[str, Any, bool]]:
        for root in self.roots:
            yield from self._of(thing, root)

    def _of(self, thing: nn.Module, root: Root) -> Iterator[tuple[str, Any, bool]]:
        if isinstance(root, Outside):
            return _tensors_in(root.name, root.now())
        path, name = root
        return _tensors_in(f"{path}.{name}".lstrip("."), thing.get_submodule(path).__dict__.get(name, MISSING))


def _tensors_in(label: str, value: Any) -> Iterator[tuple[str, Any, bool]]:
    """The tensors in a value, and what may be one's id: (where, it, whether it is asked for by which it is)."""
    todo, seen, left = [(label, value)], set[int](), _MOST
    while todo and left:
        left -= 1
        at, one = todo.pop()
        if is_a(one, torch.Tensor) or type(one) is int:
            yield at, one, False
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_a(one, (set, frozenset)):
            members = members_of(one)
            if any(is_a(t, torch.Tensor) for t in members):
                yield at, one, True
            todo += [(f"{at}{{{i}}}", t) for i, t in enumerate(members) if type(t) is int and t > _IDS]
        elif is_a(one, dict):
            for i, key in enumerate(dict.keys(one)):
                if is_a(key, torch.Tensor) or (type(key) is int and key > _IDS):
                    yield f"the key {i} of {at}", key, True
        todo += [(f"{at}{shown(step)}", inner) for step, inner in held(one) if _may_hold(inner)]


def _may_hold(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_may_hold, value))
    return type(value) not in _PLAIN or (type(value) is int and value > _IDS)
