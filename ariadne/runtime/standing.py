"""Standing: what boundaries in flight find of the model's state, whatever other calls have moved since their prefix ran.

Each call goes on from the state that its prefix left. What the prefix writes and the suffix only reads is in the boundary: as the
model's own tensor, and as a copy of it once the next prefix is to write into that. What the suffix writes as well can't be had
twice: there a call that comes between is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from ariadne.boundary import BoundaryPayload
from ariadne.cut import Sides, Slot
from ariadne.errors import BoundaryError, named
from ariadne.forks import rlock
from ariadne.plan import own


class Flight:
    """What the parts of one model's splits move, counted, and the boundaries that hold state of it.

    As a context, a prefix that writes state runs in it: boundaries in flight get copies first of what they hold.
    """

    def __init__(self) -> None:
        self.moves = 0  # how often a part wrote state
        self.before: dict[frozenset[Slot], int] = {}  # what prefixes wrote, with the number of the last time
        self.after: dict[frozenset[Slot], int] = {}  # what suffixes wrote
        self.out: WeakSet[BoundaryPayload] = WeakSet()
        self._lock = rlock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.keep()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def keep(self) -> None:
        """Give each boundary that may still be run a copy of the state that it holds."""
        if self.out:
            with self._lock:
                for boundary in [*self.out]:
                    if "train_suffix" not in boundary._consumed:
                        keep(boundary)
                    self.out.discard(boundary)

    def moved(self, by: dict[frozenset[Slot], int], slots: frozenset[Slot]) -> None:
        """Note that a prefix or a suffix, whose `by` is, writes this state now."""
        if slots:
            self.moves += 1
            by[slots] = self.moves

    def refuse_moved(self, boundary: BoundaryPayload, sides: Sides, here: bool, stood: Sequence[Any]) -> None:
        """Raise `BoundaryError` where the suffix would not find what it uses as the prefix of this call left it.

        `here`: whether that ran on this model, which may be known of bytes, too; `stood`: how the tensors stand now that both
        sides use.
        """
        with self._lock:
            boundary.refuse_if_written()
            if threading.active_count() > 1:
                keep(boundary)  # another thread's prefix may write while this suffix runs
        if not here and boundary._stood is None:
            if sides.both:
                raise BoundaryError(
                    f"{_told(min(sides.both))} is written on one side of {boundary.split_id} and used on the other, and this "
                    "boundary's prefix ran elsewhere, on a model of its own. Run both sides with one runtime, or cut elsewhere"
                )
            return
        found = boundary._stood is not None and list(stood) != boundary._stood and sides.both
        if not found and boundary._moves is not None and boundary._moves != self.moves:
            found = self._since(self.before, boundary._moves, sides.used)
            found = found or self._since(self.after, boundary._moves, sides.both)
        if found:
            raise BoundaryError(
                f"another call, or you, wrote {_told(min(found))} since the prefix of this boundary ({boundary.split_id}) ran; the "
                "suffix uses it too, and would not find it as its own call left it. Run each suffix before the next prefix, or cut "
                "where one side alone uses it"
            )

    def _since(self, by: dict[frozenset[Slot], int], moves: int, used: frozenset[Slot]) -> frozenset[Slot]:
        return next((both for slots, at in by.items() if at > moves and (both := slots & used)), frozenset())


def refuse_filled(
    boundary: BoundaryPayload,
    fills: Sequence[tuple[Slot, Mapping[str, Any]]],
    absent: Mapping[str, Collection[tuple[str, str]]],
) -> None:
    """Raise `BoundaryError` where a buffer is there by now that was None as the prefix ran, and which its suffix would fill.

    `fills`: the buffers that forward fills at its first call, each with the dict that holds it; `absent`: by module, (table, name)
    of what is None as the suffix begins.
    """
    for slot, buffers in fills:
        if buffers.get(slot[1]) is not None and ("_buffers", slot[1]) in absent.get(slot[0], ()):
            raise BoundaryError(
                f"cannot run the suffix of this boundary ({boundary.split_id}): {_told(slot)} was None when its prefix ran, and "
                "another call, or you, has filled it since, as forward does at its first call. This suffix would fill it once "
                "more; the whole model would use what is there. Make the boundary again, with the prefix, and run the first suffix "
                "before the second prefix"
            )


def _told(slot: Slot) -> str:
    return f"{slot[1]!r} of {named(slot[0])}"


def keep(boundary: BoundaryPayload) -> None:
    """Have a boundary hold copies of the tensors into which the next prefix may write, where nothing has written since."""
    at, versions, kept = boundary._held
    if not kept:
        return
    raw, now, copies = [*boundary.raw], [*versions], dict[int, torch.Tensor]()
    with torch.inference_mode(False), torch.no_grad():
        for place, i in enumerate(at):
            t = raw[i]
            if i in kept and (0 if t.is_inference() else t._version) == versions[place]:
                copy = copies.get(id(t))
                raw[i] = copies[id(t)] = own(t.detach()) if copy is None else copy
                now[place] = raw[i]._version
    boundary.raw, boundary._held = tuple(raw), (at, now, frozenset())


_FLIGHTS: WeakKeyDictionary[nn.Module, Flight] = WeakKeyDictionary()


def flight_of(model: nn.Module) -> Flight:
    """What is in flight over a model, whichever of its splits it is of."""
    return _FLIGHTS.setdefault(model, Flight())
