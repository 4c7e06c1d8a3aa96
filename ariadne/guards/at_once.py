"""At once: many things held against what they were, in one call of C++ code that torch's own compiler has for its guards.

To ask each dict for its version and each function for its code takes a call from Python each, 20 to 30 ns; a walk over the same
rows in C++ takes 8 to 18. Such a walk costs some microseconds a row to make, and serves for as long as nothing is another. So it is
made once a guard has held for some calls in a row without a write into what it rests on (`Calm`), and where it says no, all is
looked at one by one, which alone decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any

import torch

from ariadne.guards import versions

Attribute = tuple[Any, str, Any]  # a thing, a name, and what it has by that name
_OF_FUNCTIONS = {
    "__code__": "code_manager",
    "__defaults__": "func_defaults_manager",
    "__kwdefaults__": "func_kwdefaults_manager",
}
_Add = Callable[[Any], None]
_ROW = 12  # to add to a row takes longer the longer it is
_api: Any = torch._C._dynamo.guards


def at_once(
    dicts: Iterable[dict[Any, Any]], attributes: Iterable[Attribute], homes: Iterable[tuple[Any, dict[str, Any]]]
) -> Callable[[], bool] | None:
    """A function that tells whether nothing changed since; None where this torch has no such walk, or something changed already.

    It says no once one of `dicts` was written, an attribute is another thing, or an object of `homes` keeps its attributes in
    another dict or is of another class. It keeps alive what is given.
    """
    if not _serves():
        return None
    walk = _walk([*dicts], [*attributes], [*homes])
    return walk if walk() else None


def _walk(
    dicts: Sequence[dict[Any, Any]],
    attributes: Sequence[Attribute],
    homes: Sequence[tuple[Any, dict[str, Any]]],
) -> Callable[[], bool]:
    kind = sys.modules["torch._dynamo.guards"].GuardManagerType.GUARD_MANAGER
    of_homes = {id(own) for _, own in homes}  # whose versions are asked on the way
    watched = {id(table) for table in dicts}
    steps: dict[int, tuple[Any, list[_Add]]] = {}
    for thing, own in homes:
        steps.setdefault(id(thing), (thing, []))[1].append(partial(_home, thing, own, id(own) in watched, kind))
    for thing, name, value in attributes:
        steps.setdefault(id(thing), (thing, []))[1].append(partial(_attribute, thing, name, value, kind))
    for table in dicts:
        if id(table) not in of_homes:
            steps.setdefault(id(table), (table, []))[1].append(partial(_unwritten, table))
    order = [*steps.values()]
    rows = [order[i : i + _ROW] for i in range(0, len(order), _ROW)]
    root, things = _api.RootGuardManager(), [[thing for thing, _ in row] for row in rows]
    for i, row in enumerate(rows):
        of_row = root.list_getitem_manager(i, "", None, kind)
        for j, (_, adds) in enumerate(row):
            at = of_row.list_getitem_manager(j, "", None, kind)
            for add in adds:
                add(at)
    return partial(_holds, root.check, things, (attributes, homes))


def _holds(check: Callable[[Any], bool], things: list[list[Any]], kept: Any) -> bool:
    """What a walk tells; values are known to it by their ids, so they are `kept`."""
    return check(things)


def _unwritten(table: dict[Any, Any], at: Any) -> None:
    at.add_dict_version_guard(table, [], None)
    if versions.BY_LENGTH and not table:  # only an empty one may be filled without a word
        at.add_dict_length_check_guard(len(table), [], None)


def _attribute(thing: Any, name: str, value: Any, kind: Any, at: Any) -> None:
    own = _OF_FUNCTIONS.get(name) if type(thing) is FunctionType else None
    there = getattr(at, own)("", None, kind) if own else at.getattr_manager(name, "", None, kind)
    there.add_id_match_guard(id(value), [], None)


def _home(thing: Any, own: dict[str, Any], watched: bool, kind: Any, at: Any) -> None:
    at.add_type_match_guard(id(type(thing)), [], None)
    there = at.get_generic_dict_manager("", None, kind)
    there.add_id_match_guard(id(own), [], None)
    if watched:
        _unwritten(own, there)


def _serves() -> bool:
    """Whether there are walks in this process as it is now: torch loads that part of itself late, and it isn't loaded for this."""
    return versions.VERSION is not None and "torch._dynamo.guards" in sys.modules and _tells()


class _Sample:
    """A dict, a function, a cell and an object of this very class, each of which can be changed."""

    def __init__(self) -> None:
        def function(a: int = 1, *, b: int = 2) -> int:
            return a + b

        self.table, self.function, self.cell = {"a": 1}, function, CellType(1)

    def walk(self) -> Callable[[], bool]:
        attributes: list[Attribute] = [(self.function, name, getattr(self.function, name)) for name in _OF_FUNCTIONS]
        attributes += [(self.cell, "cell_contents", self.cell.cell_contents), (_Sample, "__name__", _Sample.__name__)]
        return _walk([self.table], attributes, [(self, vars(self))])


class _Another(_Sample):
    pass


_CHANGES: tuple[Callable[[_Sample], Any], ...] = (
    lambda s: s.table.update(a=2),
    lambda s: s.table.clear(),
    lambda s: s.table.update(b=2),
    lambda s: setattr(s.function, "__code__", _Sample.walk.__code__),
    lambda s: setattr(s.function, "__defaults__", (5,)),
    lambda s: setattr(s.function, "__defaults__", None),
    lambda s: setattr(s.function, "__kwdefaults__", {"b": 6}),
    lambda s: setattr(s.cell, "cell_contents", 2),
    lambda s: delattr(s.cell, "cell_contents"),
    lambda s: setattr(s, "__dict__", dict(vars(s))),
    lambda s: setattr(s, "__class__", _Another),
)


@cache
def _tells() -> bool:
    """Whether this torch's walk says yes at first, and no after each kind of change: it is nobody's public interface."""
    try:
        for change in _CHANGES:
            sample = _Sample()
            walk = sample.walk()
            if not (walk() and walk()):
                return False
            change(sample)
            if walk():
                return False
    except (AttributeError, TypeError, ValueError, RuntimeError):  # it has none, or one of another form
        return False
    return True


def changed_since() -> bool:
    """What stands for a walk where there is none: it never says that all is as it was."""
    return False


class Calm:
    """Counts calls in a row before which nothing was written, and says when a walk is worth making.

    After each that was made it waits for twice as many: where something is written now and then, few are made.
    """

    __slots__ = ("_calls", "_total", "_wanted")
    FIRST, MOST = 32, 4096

    def __init__(self) -> None:
        self._calls, self._wanted, self._total = 0, self.FIRST, -1

    def lasts(self, total: int) -> bool:
        """Take note of a call, and of the versions before it; whether they have been the same for long enough."""
        self._calls, self._total = self._calls + 1 if total == self._total else 0, total
        if self._calls < self._wanted:
            return False
        self._calls, self._wanted = 0, min(2 * self._wanted, self.MOST)
        return True
