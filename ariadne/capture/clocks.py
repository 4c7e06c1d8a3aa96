"""Clocks: whether results follow the time that forward asks for, shown by runs under clocks that tell another.

Where forward only tells how long it took, they don't.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

from ariadne.errors import UnsupportedError
from ariadne.guards import Asked, hearing

_SECONDS = "monotonic perf_counter process_time thread_time time"
_CLOCKS = {getattr(time, name): f"time.{name}" for one in _SECONDS.split() for name in (one, f"{one}_ns")}
_AHEAD = (0, 1_000, 50_000, 4_000_000_000)  # seconds: an hour, a day and a century are among those between


def refuse_world(asked: Mapping[str, Asked], once: Set[str], alone: bool, again: Callable[[], bool]) -> frozenset[str]:
    """Raise `UnsupportedError` for what forward asks the machine, but for what it asks `once`, in its first call, and for clocks
    that no result follows; returns both. `alone`: forward leaves nothing in Python; `again`: whether a further run gives the same.
    """
    more = {what: one for what, one in asked.items() if what not in once}
    if more and alone and more.keys() <= {*_CLOCKS.values()} and _same_at_other_times(more, again):
        return frozenset(asked)
    for what, one in more.items():
        raise UnsupportedError(
            f"forward asks {what} in {one.who!r}, which may tell something else in each call: a plan would go on with what it told "
            "at capture. Ask before the call, and pass the answer as an argument; or take that part as it is, by ariadne.opaque"
        )
    return frozenset(once)


def _same_at_other_times(asked: Mapping[str, Asked], again: Callable[[], bool]) -> bool:
    for ahead in _AHEAD:
        heard: set[str] = set()
        with _moved(asked, ahead), hearing(asked, heard):
            same = again()
        if heard or not same:  # by another name it was told the time as it is
            return False
    return True


@contextmanager
def _moved(asked: Mapping[str, Asked], ahead: int) -> Iterator[None]:
    """Clocks that tell this thread a time so many seconds ahead, where those who asked know them by a name."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for table in (vars(time), *(one.table for one in asked.values())):
            for name, value in [*table.items()]:
                if type(value) is BuiltinFunctionType and value in _CLOCKS:
                    kept.append((table, name, value))
                    table[name] = _clock(value, ahead)
        yield
    finally:
        for table, name, value in reversed(kept):
            table[name] = value


def _clock(real: Callable[[], Any], ahead: int) -> Callable[[], Any]:
    """A clock that goes on by a thousandth of a second each time that this thread asks; others are told the time."""
    mine, unit = threading.get_ident(), 1 if _CLOCKS[real].endswith("_ns") else 1e-9
    now = real() + ahead * type(unit)(1e9) * unit

    def clock() -> Any:
        nonlocal now
        if threading.get_ident() != mine:
            return real()
        now += int(1e6) * unit
        return now

    return clock
