"""Unheard: what forward changes by no op of torch, so that a plan would leave it out: arrays in place, and context variables.

Tensors that are written through their arrays are seen as forward runs (see `written`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ariadne.capture.raw import lender
from ariadne.capture.state import Snapshot
from ariadne.errors import UnsupportedError
from ariadne.guards import BOOKKEEPING, MISSING, Place, held


def refuse_unheard(snapshot: Snapshot) -> None:
    """Raise `UnsupportedError` for such a change since the snapshot, but for those of parts that are taken as they are."""
    array = next(snapshot.changed_arrays(), None)
    if array is not None:
        raise UnsupportedError(
            f"forward writes in place into {_words(snapshot, array)} ({_kind(array)}): no op of torch does that, so a plan would "
            "leave it out. Keep such state in a buffer, and write it by torch's ops; if forward does so when it runs first alone, "
            "run the model once, model(*example_inputs), and prepare then"
        )
    variable = next(snapshot.changed_context(), None)
    if variable is not None:
        raise UnsupportedError(
            f"forward sets the context variable {variable.name!r}, which no plan does; return what it sets, or have forward put "
            "it back before it ends, by reset()"
        )


def _kind(thing: Any) -> str:
    cls = type(thing)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def _words(snapshot: Snapshot, thing: Any) -> str:
    """Where a thing stands that the snapshot noted, as a user would say it."""
    todo, seen = [*_starts(snapshot)], set[int]()
    while todo:
        place, value = todo.pop(0)
        if value is thing or (type(value) is memoryview and lender(value) is thing):
            named_by_itself = place.table == "outside"
            return place.words() if named_by_itself else replace(place, steps=place.steps[:-1]).words(*place.steps[-1:])
        if id(value) not in seen:
            seen.add(id(value))
            todo += [(Place(place.table, place.path, (*place.steps, step)), inner) for step, inner in held(value)]
    return "something that it reaches"


def _starts(snapshot: Snapshot) -> Iterator[tuple[Place, Any]]:
    for path, module in (*snapshot.modules.items(), *snapshot.strays.items()):
        for name, value in module.__dict__.items():
            if name not in BOOKKEEPING:
                yield Place("held", path, (name,)), value
    for side, part in enumerate(snapshot.given):
        for step, value in held(part):
            yield Place("input", "", (side, step)), value
    for root in (*snapshot.outside.moving, *snapshot.outside.roots):
        if not root.names and (now := root.now()) is not MISSING:
            yield Place("outside", root.name, root.steps), now
