"""Watched dicts: what stands in them is compared again only after something was written into one.

torch's own compiler gives each dict a number that changes when it is written (`dict_version`). To compare one number for each
module touches a fifth of the memory that its attributes lie in, and memory is what a guard's time goes into: between two calls
the model's weights have pushed it all out of the caches. A version only grows: the sum of all tells whether one has changed, and
is one number to remember.
"""

from __future__ import annotations

import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import getitem, is_not
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.guards.attributes import MISSING, Slots, is_a, lasts
from ariadne.guards.kept import Contents, Kept, OfTables
from ariadne.guards.opened import State
from ariadne.guards.outside import NAMES, PARTS, Outside, add_to, is_class, is_function, is_itself
from ariadne.guards.versions import VERSION, stamp

_AUDITED = sys.version_info >= (3, 12)
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
        # Values may be equal and yet be something else (1, 1.0 and True, a text and a member of an Enum of texts): they are
        # compared by identity first. A training flag is only ever asked whether it is true.
        loose = [s for s in plain if s[1] == "training"]
        strict = [s for s in plain if s[1] != "training"]
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


class Part(ABC):
    """Some of what a guard looks at: what rests on `dicts`, and is compared again, by `still`, only after one of them was written.

    What is `asked` has to hold at each call beside. The dicts are another list once it rests on others.
    """

    dicts: list[dict[Any, Any]]
    asked: list[Callable[[], bool]]
    _total = -1  # of the dicts, when it was compared last

    def still(self) -> bool:
        """Whether it is as it was, as far as it rests on dicts that were written."""
        dicts, total = self.dicts, stamp(self.dicts)
        if total == self._total and VERSION is not None:
            return True
        if not self.compare():
            return False
        self._total = total if self.dicts is dicts else -1
        return True

    @abstractmethod
    def compare(self) -> bool:
        """Whether it is as it was."""


class Watched(Part):
    """A comparison, part of which rests on dicts alone."""

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
        self._all = Comparison(plain, identical, sized, families, absent)
        self.asked = [] if rest.is_empty else [rest.holds]

    def compare(self) -> bool:
        """Whether all of it is as it was."""
        return self._all.holds()


class Named(Part):
    """The names that stand in tables. Those of buffers are written by the plan itself, and are asked apart."""

    def __init__(self, kept: Sequence[OfTables], modules: Iterable[nn.Module]) -> None:
        self._kept = kept if VERSION is not None else []
        written = {id(m._buffers) for m in modules if m._buffers}
        tables = {id(table): table for one in self._kept for table in one.rests_on()}
        self.dicts = [table for at, table in tables.items() if at not in written]
        self._written = [table for at, table in tables.items() if at in written]
        self._last = -1  # of these, when they were looked through last
        self.asked = [self._asked_of_buffers] if self._written else []

    def takes(self, kept: Kept) -> bool:
        """Whether it looks at this one."""
        return any(kept is one for one in self._kept)

    def compare(self) -> bool:
        """Whether all of them are as they were."""
        return all(one.asked() for one in self._kept)

    def _asked_of_buffers(self) -> bool:
        total = stamp(self._written)
        if total != self._last:
            if not self.compare():
                return False
            self._last = total
        return True


class Functions:
    """The code and defaults of functions, which are asked for all at once.

    Python tells tools of each such question, and `filelock`, which comes with transformers, listens on Python 3.12 and later.
    """

    def __init__(self, parts: Sequence[Outside]) -> None:
        self.parts = parts
        self._functions = [*{id(o.table.thing): o.table.thing for o in parts}.values()]
        self._lay_out()

    def _lay_out(self) -> None:
        self._held = gc.get_referents(*self._functions)
        given = {id(o.value) for o in self.parts if o.key != "__code__"}
        self._at = [i for i, thing in enumerate(self._held) if id(thing) in given]

    def hold(self) -> bool:
        """Whether the functions have them still: codes that equal each other do the same, defaults that do may not."""
        now, held = gc.get_referents(*self._functions), self._held
        try:
            if now == held and all(now[i] is held[i] for i in self._at):
                return True
        except Exception:  # of what stands in other defaults now, which have their own ways to compare
            return False
        if not all(o.is_same() for o in self.parts):
            return False
        self._lay_out()
        return True


class Surrounded(Part):
    """What stands outside of a model: for each of some dicts, what rests on it."""

    def __init__(self, outside: Iterable[Outside]) -> None:
        self._on: list[tuple[dict[Any, Any], Outside]] = []
        self._states: list[State] = []  # things that rest on dicts, which are others once something else stands there
        slots: list[Outside] = []  # attributes, and closed-over variables
        parts: dict[str, list[Outside]] = {part: [] for part in (*PARTS, *NAMES)}
        rest: list[Callable[[], bool]] = []
        places: dict[Any, Outside] = {}
        for one in outside:
            add_to(places, one)
        for one in places.values():
            dicts = one.dicts if VERSION is not None else []
            inside = [one.value] if VERSION is not None and one.kept is not None and type(one.value) is dict else []
            self._on += [(table, one) for table in (*dicts, *inside)]
            told = bool(inside)  # of what it holds, by the version of a dict
            if isinstance(one.kept, State) and not one.kept.watched.loose:
                self._states.append(one.kept)
                told = True
            apart = one.kept is not None and not told
            if not dicts:
                if one.key in parts and (is_function(one.table) if one.key in PARTS else is_class(one.table)):
                    parts[one.key].append(one)
                elif is_a(one.table, Slots) and one.value is not MISSING:
                    slots.append(one)
                elif not is_itself(one.table):
                    rest.append(one.is_same if apart else one.stands)
                    continue
            if apart and one.kept is not None:
                rest.append(one.kept.is_same)
        self._lay_out()
        at_once = Functions([o for part in PARTS for o in parts.pop(part)]) if _AUDITED else None
        found = [(o, part) for part, group in [*parts.items(), ("", slots)] for o in group]
        self._parts = [o for o, _ in found]
        self._things, self._names = [o.table.thing for o, _ in found], [part or o.key for o, part in found]
        self._values = [o.value for o, _ in found]
        # What a walk of C++ can ask instead; see `at_once`.
        self.in_one_walk: list[Callable[[], bool]] = [
            *([at_once.hold] if at_once is not None and at_once.parts else []),
            *([self._keeps_its_parts] if found else []),
            *([self._keep_their_dicts] if self._states else []),
        ]
        self._functions = [(o.table.thing, o.key, o.value) for o in (at_once.parts if at_once is not None else ())]
        self.asked = [*self.in_one_walk, *rest]

    @property
    def attributes(self) -> Iterator[tuple[Any, str, Any]]:
        """Things, names, and what they have by these."""
        yield from self._functions
        yield from zip(self._things, self._names, self._values, strict=True)

    @property
    def owners(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """Objects, and the dicts in which they keep their attributes."""
        return zip(self._owners, self._owned, strict=True)

    def _lay_out(self) -> None:
        """Group what rests on dicts by these, for which a look at a `State` tells."""
        groups: dict[int, tuple[dict[Any, Any], list[Outside | State]]] = {}
        on: list[tuple[dict[Any, Any], Outside | State]] = [*self._on]
        on += [(table, state) for state in self._states for table in state.watched.dicts]
        for table, one in on:
            groups.setdefault(id(table), (table, []))[1].append(one)
        self._groups = list(groups.values())
        self.dicts = [table for table, _ in self._groups]
        self._versions: list[int | None] = [None] * len(self.dicts)
        self._looked = [state.watched for state in self._states]
        owners = {
            id(thing): (thing, own, kind)
            for looked in self._looked
            for (thing, own), kind in zip(looked.owners, looked.kinds, strict=True)
        }
        self._owners = [thing for thing, _, _ in owners.values()]
        self._owned = [own for _, own, _ in owners.values()]
        self.kinds = [kind for _, _, kind in owners.values()]

    def _keep_their_dicts(self) -> bool:
        return same_dicts(self._owners, self._owned) and [*map(type, self._owners)] == self.kinds

    def _keeps_its_parts(self) -> bool:
        """Whether functions, cells and objects hold what they held."""
        try:
            if not any(map(is_not, map(getattr, self._things, self._names), self._values)):
                return True
        except (AttributeError, ValueError):  # one that forward looked for in vain; an empty cell
            pass
        return all(o.stands() for o in self._parts)

    def compare(self) -> bool:
        """Whether what rests on the dicts that were written is as it was."""
        versions: list[int | None] = [VERSION(table) for table in self.dicts if VERSION is not None]
        for now, then, (_, found) in zip(versions, self._versions, self._groups, strict=True):
            if now != then and not all(o.is_same() for o in found):
                return False
        self._versions = versions
        if any(state.watched is not looked for state, looked in zip(self._states, self._looked, strict=True)):
            self._lay_out()
            return not any(
                state.watched.loose for state in self._states
            )  # these are asked at each call, once laid out anew
        return True


def same_dicts(things: Sequence[Any], dicts: Sequence[Any]) -> bool:
    """Whether objects keep their attributes where they did: what is written into another dict is not told."""
    try:
        return not any(map(is_not, map(object.__getattribute__, things, repeat("__dict__")), dicts))
    except AttributeError:
        return False


def same_hooks(hooks: dict[int, Any], expected: list[Any] | None) -> bool:
    """Whether these are the hooks that are expected, in order."""
    return [*hooks.values()] == expected


def is_known(own: dict[str, Any], name: str, before: bool, now: bool, beside: list[tuple[dict[str, Any], str]]) -> bool:
    """Whether a flag is as before the first call, or as after it, with what that call fills."""
    found = own.get(name)
    return found is before or (found is now and all(table.get(n) is not None for table, n in beside))
