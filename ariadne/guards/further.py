"""What one guard asks beyond another that was asked a moment ago: a call that goes on in another plan asks no more."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_not
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.guards.calls import ModuleGuard
from ariadne.guards.versions import stamp

_own_of = attrgetter("__dict__")


class Further:
    """Whether `guard` holds, where `known` was asked just before, and holds.

    Dicts that both rest on are left out as long as `known` sees no write into any of its own; and modules of which both expect the
    same, and what both ask of the same thing. After a write the whole guard is asked.
    """

    def __init__(self, guard: ModuleGuard, known: ModuleGuard) -> None:
        self._guard, self._known = guard, known
        self._lay_out()

    def _lay_out(self) -> None:
        guard, known = self._guard, self._known
        self._of = guard._dicts, known._dicts  # each guard makes new ones when it is laid out anew
        self._known_total = self._total = -1  # of the dicts of `known`, and of the others, when the whole guard held
        seen, hookless = set(map(id, known._dicts)), set(map(id, known._hookless))
        self._dicts = [table for table in guard._dicts if id(table) not in seen]
        self._hookless = [table for table in guard._hookless if id(table) not in hookless]
        alike = {(id(m), id(own), cls) for m, own, cls in zip(known._modules, known._own, known._classes, strict=True)}
        rows: list[tuple[nn.Module, dict[str, Any], type]] = [
            row
            for row in zip(guard._modules, guard._own, guard._classes, strict=True)
            if (id(row[0]), id(row[1]), row[2]) not in alike
        ]
        self._modules, self._own, self._classes = ([row[i] for row in rows] for i in range(3))
        answered = {one.asked for one in guard.contents if any(one.asks_as(other) for other in known.contents)}
        if _surroundings(guard) <= _surroundings(known):
            answered.update(guard.surrounded.in_one_walk)
        self._asked = [ask for ask in guard._asked if ask not in answered]

    def __call__(self) -> bool:
        guard, known = self._guard, self._known
        if self._of[0] is not guard._dicts or self._of[1] is not known._dicts:
            self._lay_out()
        known_total, total = known._total, stamp(self._dicts)
        if known_total != self._known_total or total != self._total:
            if not guard():
                return False
            self._known_total, self._total = known_total, total
            return True
        for ask in self._asked:
            if not ask():
                return False
        if self._modules and any(map(is_not, map(_own_of, self._modules), self._own)):
            return False
        return not any(self._hookless) and (not self._modules or list(map(type, self._modules)) == self._classes)


def _surroundings(guard: ModuleGuard) -> set[tuple[Any, ...]]:
    """What a guard asks, but for dicts, of what stands outside of a model: the things, names, and what is expected."""
    attributes = {(id(thing), name, id(value)) for thing, name, value in guard.surrounded.attributes}
    homes = zip(guard.surrounded.owners, guard.surrounded.kinds, strict=True)
    return attributes | {(id(thing), id(own), kind) for (thing, own), kind in homes}


def enter_alike(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two functions of `entrance` ask and give the same, but for the batches that they take: what entered by one, and has
    a batch that the other takes, enters by that."""
    asks = getattr(one, "asks", None)
    if asks is None or asks != getattr(other, "asks", None):
        return False
    names, theirs = one.__globals__, other.__globals__
    # `again` calls the entrance itself, in the form of `spec`. Where inputs carry none of many marks, they carry none of fewer.
    besides = {"again", "enter", "__builtins__", "mark_names"}
    return theirs["mark_names"] <= names["mark_names"] and all(
        _is_one(names[n], theirs.get(n)) for n in names if n not in besides
    )


def _is_one(a: Any, b: Any) -> bool:
    """Whether two things that an entrance names are one, or plain and equal."""
    if a is b:
        return True
    plain = type(a) is type(b) and (isinstance(a, (tree.Spec, frozenset, bool, int, str)) or a == {})
    return plain and bool(a == b)
