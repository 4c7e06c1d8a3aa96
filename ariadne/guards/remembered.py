"""Remembered: what functions such as `functools.cache` makes had kept before a forward ran that asked them again.

Their code did not run then, so nothing shows what the results rest on: these must stand there still, or the call is captured anew.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ariadne import tree
from ariadne.errors import UnsupportedError
from ariadne.guards.attributes import MISSING, entries_beside, entries_of, lasts, own_of
from ariadne.guards.versions import VERSION

Entry = tuple[Any, Any]  # what a function was asked, and its result


class Remembered:
    """Results that a function had kept, and gave to forward."""

    __slots__ = ("entries", "memory", "table", "version")

    def __init__(self, memory: Any, entries: Sequence[Entry]) -> None:
        self.memory, self.entries = memory, entries
        own = own_of(memory)
        self.table = next((t for t in gc.get_referents(memory) if type(t) is dict and t is not own), {})
        self.version = -1

    def holds(self) -> bool:
        """Whether they stand there still, or plain values equal to them; looked up anew only after the function kept another."""
        version = -1 if VERSION is None else VERSION(self.table)
        if version == self.version and version != -1:
            return True
        now = dict(entries_of(self.memory))
        for key, result in self.entries:
            found = now.get(key, MISSING)
            if found is not result and not (lasts(found) and lasts(result) and tree.identical(found, result)):
                return False
        self.version = version
        return True

    def of_copy(self) -> Remembered:
        """The same for a deep copy of the model, which asks for itself where what is asked is no plain value."""
        plain = all(lasts(key) for key, _ in self.entries)
        return Remembered(self.memory, self.entries if plain else [(object(), None)])


def all_hold(remembered: Sequence[Remembered]) -> bool:
    """Whether all of them do."""
    return all(one.holds() for one in remembered)


def refuse_pushed_out(remembered: Iterable[Remembered]) -> None:
    """Raise `UnsupportedError` where a function that keeps a few results alone has let go of one that it gave to forward.

    A capture runs forward at several batches, and of such a cache nothing can be put back.
    """
    for one in remembered:
        most = one.memory.cache_parameters()["maxsize"]
        if most is not None and not one.holds():
            name = getattr(one.memory, "__qualname__", type(one.memory).__name__)
            raise UnsupportedError(
                f"forward got a result that {name!r} had kept, which keeps {most} (functools.lru_cache(maxsize={most})); to "
                "capture that, forward runs at several batches, and the results of these took its place. Let it keep more, such "
                f"as maxsize=128, or call {name}.cache_clear() before each call of the split"
            )


class Memories:
    """What such functions keep at one moment."""

    def __init__(self, memories: Iterable[Any]) -> None:
        self._kept = [(memory, entries_of(memory), memory.cache_info().hits) for memory in memories]

    def grew(self) -> bool:
        """Whether one keeps more results than it did."""
        return any(memory.cache_info().currsize != len(kept) for memory, kept, _ in self._kept)

    def new(self) -> Iterator[tuple[Any, list[Entry]]]:
        """The functions that keep other results now, with these."""
        return ((memory, new) for memory, kept, _ in self._kept if (new := entries_beside(memory, kept)))

    def asked_again(self) -> list[Remembered]:
        """What functions had kept that gave a result again since."""
        return [Remembered(m, kept) for m, kept, hits in self._kept if kept and m.cache_info().hits != hits]

    def forget(self) -> None:
        """Have those that kept nothing keep nothing again; of others, single results can't be taken out."""
        for memory, kept, _ in self._kept:
            if not kept and memory.cache_info().currsize:
                memory.cache_clear()
