"""Left: what a first call leaves behind, told as plain values: the first call of all decides what later ones find there.

A plan was captured in the state before a first call. Where another call was the first, and would have left something else than
this plan's, the model goes on with that, and the plan does not.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ariadne.guards.attributes import MISSING, entries_of, follow, is_a, kinds_of
from ariadne.guards.effects import contents
from ariadne.guards.first_calls import first_calls
from ariadne.guards.kept import Kept
from ariadne.guards.roots import Root
from ariadne.guards.told import Content, agree, entries_agree, told_of

EVERY = 0  # a batch: what was left follows none
_WORDS = reprlib.Repr()
_WORDS.maxlevel, _WORDS.maxtuple, _WORDS.maxstring = 4, 8, 40


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A container outside of a model, variables, or a function that keeps its results; the same for all who hold it."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elsewhere) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        of_root = is_a(self.thing, Root)
        return (id(self.thing.thing), self.thing.names) if of_root else (id(self.thing),)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a first call left something: in an attribute of a module, or in a container: of a module, by `steps`, or elsewhere.

    `kind`: of a container, as `kind_of` has it, or "memory"; empty for an attribute.
    """

    path: str
    steps: tuple[Any, ...]
    kind: str = ""
    elsewhere: Elsewhere | None = None

    def was_filled(self, model: nn.Module, attributes: Collection[tuple[str, str]]) -> bool:
        """Whether an earlier call, which filled these attributes, may have filled it: not where nothing stands, in none of them."""
        known = not self.steps or (self.path, self.steps[0]) in attributes
        return bool(attributes) and (known or self.told(model) is not MISSING)

    def told(self, model: nn.Module) -> Any:
        """What stands there now: of a container, by key; `MISSING` where nothing does, or None."""
        try:
            found = (
                self.elsewhere.thing if self.elsewhere else follow(model.get_submodule(self.path).__dict__, self.steps)
            )
        except (LookupError, AttributeError, TypeError):
            return MISSING
        if not self.kind:
            return MISSING if found is None else told_of(found)
        if self.kind == "memory" or is_a(found, Root) or self.kind in kinds_of(found):
            return _entries(found, self.kind)
        return MISSING


def _entries(thing: Any, kind: str) -> dict[Any, Any]:
    """What a container holds, or a function keeps, told by key; in a set the things are the keys."""
    if kind == "memory":
        return {told_of(key): told_of(value) for key, value in entries_of(thing)}
    return told_entries(contents(thing, kind))


def told_entries(found: Any) -> dict[Any, Any]:
    """The same of a container's contents."""
    if type(found) is set:
        return {told_of(one): True for one in found}
    pairs = found.items() if type(found) is dict else enumerate(found)
    return {told_of(key): told_of(value) for key, value in pairs}


class Left(NamedTuple):
    """What this plan's first call left at a batch, or at any: `EVERY`; `before`: what stood there; `where`, in words.

    `counted`: of a container, whether a result follows what else is in it, so that it is no cache.
    """

    where: str
    value: Any
    before: Any
    batch: int
    counted: bool = False

    def agrees(self, first: Left, kind: str) -> bool:
        """Whether another first call left the same. Numbers may follow the batch, so of two batches they are not compared.

        Of functions that keep their results, nor are those for other arguments.
        """
        if first is self:
            return True
        exactly = first.batch == self.batch or EVERY in (first.batch, self.batch)
        if type(self.value) is dict and type(first.value) is dict:
            if (self.counted or first.counted) and self.value.keys() != first.value.keys():
                return False
            return entries_agree(first.value, self.value, exactly, of_both=kind == "memory")
        return agree(first.value, self.value, exactly)

    def beside(self, other: Left) -> Left:
        """The same, of a plan that at another batch left this other one: where that is the same, no batch counts."""
        return self._replace(batch=EVERY) if other.batch != self.batch and self.value == other.value else self

    def stands(self, there: Any) -> bool:
        """Whether something stands in this place, put there by a call of the model itself: then other guards hold that."""
        return there is not MISSING and there != self.before


class AsLeft(Kept):
    """What a plan's first call leaves: the first call of all decides, and a plan that would leave something else, or nothing
    where forward reads that, goes on otherwise than the model does."""

    __slots__ = ("calls", "lefts", "reads", "turn")

    def __init__(self, thing: nn.Module, lefts: Mapping[Site, Left], reads: frozenset[tuple[str, str]]) -> None:
        self.lefts, self.reads, self.calls, self.turn = lefts, reads, first_calls(thing), -1
        super().__init__(thing)

    def look(self, thing: Any) -> Any:
        """What this plan leaves."""
        return {left.where: left.value for left in self.lefts.values()}

    def words(self, held: Any) -> str:
        """That."""
        return _WORDS.repr(held)

    def is_same(self) -> bool:
        """Whether it leaves what the first call did."""
        return self.other() is None

    def other(self) -> tuple[str, str, str] | None:
        """The first thing that the first call left otherwise: where, what, and what this plan's would have left."""
        for site, left in self.lefts.items():
            first = self._first(site, left)
            if not left.agrees(first, site.kind):
                one, mine = _unlike(first.value, left.value)
                return left.where, _words(one), _words(mine)
        for site, first in self.calls.items() if self.reads else ():
            is_read = isinstance(site, Site) and site.elsewhere is None and (site.path, site.steps[0]) in self.reads
            if is_read and site not in self.lefts and not first.stands(site.told(self.thing)):
                return first.where, _words(first.value), "nothing that the next calls keep"
        return None

    def asked(self) -> bool:
        """The same, for a call, which may be the first."""
        if self.calls.turn == self.turn:
            return True
        if not self.is_same():
            return False
        for site in self.lefts.keys() - self.calls.keys():
            self.calls.note(site, self.lefts[site])
        self.turn = self.calls.turn
        return True

    def anew(self, thing: Any) -> Kept:
        """The same of a copy, which was called as often."""
        copied = type(self)(thing, self.lefts, self.reads)
        for site, first in self.calls.items():
            if isinstance(site, Site) and site not in copied.calls:
                copied.calls.note(site, first)
        return copied

    def _first(self, site: Site, left: Left) -> Left:
        known: Left | None = self.calls.get(site)
        if known is not None:
            return known
        there = site.told(self.thing)  # by a call of the model itself
        if type(there) is dict and type(left.before) is dict:
            there = {key: value for key, value in there.items() if left.before.get(key, MISSING) != value} or MISSING
        return left if there is MISSING or there == left.before else Left(left.where, there, MISSING, -1)


def _unlike(one: Any, other: Any) -> tuple[Any, Any]:
    """What two first calls left that is not the same: of containers, at a key that both have."""
    if type(one) is dict and type(other) is dict:
        return next(((one[k], other[k]) for k in one if k in other and one[k] != other[k]), (one, other))
    return one, other


def _words(told: Any) -> str:
    """What is told of a thing, for an error: a tensor by its dtype and sizes, without what tells its numbers."""
    if type(told) is Content and len(told) > 3 and type(told[3]) is tuple:
        return f"a {told[0]} of {str(told[1]).removeprefix('torch.')}{[*told[3]]}"
    if type(told) is dict:
        shown = [f"{_WORDS.repr(key)}: {_words(value)}" for key, value in told.items()]
        return f"{{{', '.join([*shown[:4], *(['...'] if len(shown) > 4 else [])])}}}"
    return _WORDS.repr(told)


def merged(recordings: Iterable[Mapping[Site, Left]]) -> dict[Site, Left]:
    """What the runs left that one plan was made of."""
    found: dict[Site, Left] = {}
    for recorded in recordings:
        for site, left in recorded.items():
            found[site] = found[site].beside(left) if site in found else left
    return found
