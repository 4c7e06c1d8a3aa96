"""Watched dicts: what stands in them is compared again only after something was written into one.

torch's own compiler gives each dict a number that changes when it is written (`dict_version`). To compare one number for each
module touches a fifth of the memory that its attributes lie in, and memory is what a guard's time goes into: between two calls
the model's weights have pushed it all out of the caches. A version only grows: the sum of all tells whether one has changed, and
is one number to remember.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import getitem, is_not
from typing import Any

from ariadne import tree
from ariadne.guards.attributes import lasts
from ariadne.guards.kept import Contents, Kept
from ariadne.guards.outside import NAMES, PARTS, Outside, is_cell, is_class, is_function
from ariadne.guards.versions import VERSION

Slot = tuple[Any, Any, Any]  # a table, a key, and what stands there


class Comparison:
    """Slots and the plain values that stand there, slots and objects, containers and their sizes, dicts and their items in order,
    dicts and keys that they don't have.

    Laid out as parallel lists, for loops that run in C and touch little memory.
    """

    def __init__(
        self,
        plain: Iterable[Slot],
        identical: Iterable[Slot],
        sized: Iterable[tuple[Any, int]],
        families: Iterable[tuple[Any, Sequence[tuple[str, Any]]]],
        absent: Iterable[tuple[Any, str]],
    ) -> None:
        plain, sized, families = list(plain), list(sized), list(families)
        # Numbers may be equal and yet compute something else (1, 1.0 and True): they are compared by identity first, the rest
        # by ==, which costs half as much. A training flag is only ever asked whether it is true.
        loose = [s for s in plain if s[1] == "training" or isinstance(s[2], str | None)]
        strict = [s for s in plain if not (s[1] == "training" or isinstance(s[2], str | None))]
        self.boxes = [(*s, _box(s)) for s in strict if not lasts(s[2])]  # containers, of which copies are kept
        strict = [s for s in strict if lasts(s[2])]
        self.tables, self.names, self.values = ([s[i] for s in strict] for i in range(3))
        self.loose_tables, self.loose_names, self.loose_values = ([s[i] for s in loose] for i in range(3))
        self.identical = list(identical)
        self.sized, self.sizes = [t for t, _ in sized], [n for _, n in sized]
        self.families = [members.items() for members, _ in families]
        self.members = list(chain.from_iterable(items for _, items in families))
        self.absent = list(absent)
        self.is_empty = not any((loose, strict, self.boxes, self.identical, sized, families, self.absent))

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            if list(map(getitem, self.loose_tables, self.loose_names)) != self.loose_values:
                return False
            if any(map(is_not, map(getitem, self.tables, self.names), self.values)) and not self._same_numbers():
                return False
            for table, name, value, kept in self.boxes:
                found = table[name]
                if not (kept is not None and kept.holds(found)) and not tree.identical(found, value):
                    return False
            for table, name, thing in self.identical:
                if table[name] is not thing:
                    return False
        except (LookupError, ValueError):  # gone, or now an array, which has no truth value
            return False
        return (
            list(map(len, self.sized)) == self.sizes
            and list(chain.from_iterable(self.families)) == self.members
            and not any(name in table for table, name in self.absent)
        )

    def _same_numbers(self) -> bool:
        found = map(getitem, self.tables, self.names)
        return all(a is b or tree.identical(a, b) for a, b in zip(found, self.values, strict=True))


def _box(slot: Slot) -> Contents | None:
    """What stands in a slot now, if it is the same as was kept of it and can be compared quickly."""
    table, name, value = slot
    try:
        found = table[name]
    except LookupError:
        return None
    return Contents(found) if Contents.takes(found) and tree.identical(found, value) else None


class Watched:
    """A comparison, part of which rests on `dicts` alone and is made again, by `still`, only after one of them was written.

    What is `asked` has to hold at each call beside.
    """

    def __init__(
        self,
        dicts: Iterable[dict[Any, Any]],
        plain: Sequence[Slot],
        identical: Sequence[Slot],
        sized: Sequence[tuple[Any, int]],
        families: Sequence[tuple[Any, Sequence[tuple[str, Any]]]],
        absent: Sequence[tuple[Any, str]],
    ) -> None:
        watched = {id(d): d for d in dicts if VERSION is not None and type(d) is dict}
        rest = Comparison(
            [s for s in plain if id(s[0]) not in watched or not lasts(s[2])],
            [s for s in identical if id(s[0]) not in watched],
            [s for s in sized if id(s[0]) not in watched],
            [f for f in families if id(f[0]) not in watched],
            [a for a in absent if id(a[0]) not in watched],
        )
        self.dicts = list(watched.values())
        self.still = Comparison(plain, identical, sized, families, absent).holds
        self.asked: list[Callable[[], bool]] = [] if rest.is_empty else [rest.holds]


class Surrounded:
    """What stands outside of a model: for each of some `dicts`, what rests on it, and what is `asked` at each call."""

    def __init__(self, outside: Iterable[Outside]) -> None:
        groups: dict[int, tuple[dict[Any, Any], list[Outside]]] = {}
        cells: list[Outside] = []
        parts: dict[str, list[Outside]] = {part: [] for part in (*PARTS, *NAMES)}
        rest: list[Kept | Outside] = []
        for one in {o.place: o for o in outside}.values():
            dicts = one.dicts if VERSION is not None else []
            inside = [one.value] if VERSION is not None and one.kept is not None and type(one.value) is dict else []
            if one.kept is not None and not inside:
                rest.append(one.kept)
            for table in (*dicts, *inside):
                groups.setdefault(id(table), (table, []))[1].append(one)
            if dicts:
                continue
            if one.key in parts and (is_function(one.table) if one.key in PARTS else is_class(one.table)):
                parts[one.key].append(one)
            elif is_cell(one.table):
                cells.append(one)
            else:
                rest.append(one)
        self._groups = list(groups.values())
        self.dicts = [table for table, _ in self._groups]
        self._versions: list[int | None] = [None] * len(self.dicts)
        found = [(o, part) for part, group in [*parts.items(), ("cell_contents", cells)] for o in group]
        self._parts = [o for o, _ in found]
        self._things, self._names = [o.table.thing for o, _ in found], [part for _, part in found]
        self._values = [o.value for o, _ in found]
        self.asked: list[Callable[[], bool]] = [*([self._keeps_its_parts] if found else []), *(o.is_same for o in rest)]

    def _keeps_its_parts(self) -> bool:
        """Whether functions and cells hold what they held."""
        try:
            if not any(map(is_not, map(getattr, self._things, self._names), self._values)):
                return True
        except ValueError:  # an empty cell
            return False
        return all(o.is_same() for o in self._parts)

    def still(self) -> bool:
        """Whether what rests on the dicts that were written is as it was."""
        versions: list[int | None] = [VERSION(table) for table in self.dicts if VERSION is not None]
        for now, then, (_, found) in zip(versions, self._versions, self._groups, strict=True):
            if now != then and not all(o.is_same() for o in found):
                return False
        self._versions = versions
        return True


def same_hooks(hooks: dict[int, Any], expected: list[Any] | None) -> bool:
    """Whether these are the hooks that are expected, in order."""
    return [*hooks.values()] == expected


def is_known(own: dict[str, Any], name: str, before: bool, now: bool, beside: list[tuple[dict[str, Any], str]]) -> bool:
    """Whether a flag is as before the first call, or as after it, with what that call fills."""
    found = own.get(name)
    return found is before or (found is now and all(table.get(n) is not None for table, n in beside))
