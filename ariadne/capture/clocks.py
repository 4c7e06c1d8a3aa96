"""Clocks: whether forward only tells the time, as one does that says how long it took.

It runs once more under clocks whose numbers note what is asked of them: to be added up and put into words is all that they take.
"""

from __future__ import annotations

import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any
from weakref import ref

from ariadne.errors import UnsupportedError
from ariadne.guards import Question, asker, hearing

_NAMES = "monotonic perf_counter process_time thread_time time"
_CLOCKS = {getattr(time, name): f"time.{name}" for one in _NAMES.split() for name in (one, f"{one}_ns")}
_NUMBERS = "add sub mul truediv floordiv mod divmod"  # and from the right, with plain numbers
_ALONE = ("__neg__", "__pos__", "__abs__", "__round__", "__floor__", "__ceil__")
_ASKING = "bool float int index complex trunc hash eq ne lt le gt ge pow rpow"


def refuse_world(asked: Mapping[str, Question], once: Set[str], again: Callable[[], bool] | None) -> frozenset[str]:
    """Raise `UnsupportedError` for what forward asks the machine, but for what it asks `once`, in its first call, and for the time
    that it only tells; returns both. `again`: whether it gives the same in a further run, where it may run.
    """
    more = {what: one for what, one in asked.items() if what not in once}
    of_clocks = more.keys() <= {*_CLOCKS.values()}
    if not more or (again is not None and of_clocks and _only_told(more, again)):
        return frozenset({*once, *more})
    told = ", ".join(f"{what} in {one.who!r}" for what, one in [*more.items()][:3])
    way = "" if of_clocks else "; or take that part as it is, by ariadne.opaque"
    raise UnsupportedError(
        f"forward asks {told}, which may tell something else in each call: a plan would go on with what it told at capture. Ask "
        f"before the call, and pass the answer as an argument{way}"
    )


def _only_told(asked: Mapping[str, Question], again: Callable[[], bool]) -> bool:
    heard, log = set[str](), _Log()
    with _told(asked, log), hearing(asked, heard):
        same = again()
    # By another name it heard a clock as it is; and what lives on, something keeps.
    return same and not heard and not log.noted and not any(number() is not None for number in log.numbers)


class _Log:
    """The numbers that clocks gave, and what was made of them; and what was asked of these."""

    def __init__(self) -> None:
        self.numbers: list[ref[_Number]] = []
        self.noted: list[str] = []


@contextmanager
def _told(asked: Mapping[str, Question], log: _Log) -> Iterator[None]:
    """Clocks that give forward such numbers, in this thread, where those who asked know them by a name."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    mine, over = threading.get_ident(), threading.Event()

    def clock_for(real: Callable[[], Any]) -> Callable[[], Any]:
        now = real()

        def clock() -> Any:
            nonlocal now
            if over.is_set() or threading.get_ident() != mine or not asker(sys._getframe(1)):
                return real()
            now += 1_000_000 if type(now) is int else 1e-3
            return _Number(now, log)

        return clock

    tables = [vars(time), vars(timeit), *(table for one in asked.values() for table in one.tables)]
    try:
        for table in tables:
            for name, value in [*table.items()]:
                if type(value) is BuiltinFunctionType and value in _CLOCKS:
                    kept.append((table, name, value))
                    table[name] = clock_for(value)
        yield
    finally:
        over.set()  # who took one of these meanwhile has a clock
        for table, name, value in reversed(kept):
            table[name] = value


class _Number:
    """A time, or what was made of some. It is no number of Python's: whoever computes with it in C asks for one."""

    def __init__(self, value: Any, log: _Log) -> None:
        self._value, self._log = value, log
        log.numbers.append(ref(self))

    def _made(self, value: Any) -> Any:
        return tuple(map(self._made, value)) if type(value) is tuple else _Number(value, self._log)

    def __getattr__(self, name: str) -> Any:
        self._log.noted.append(name)
        return getattr(self._value, name)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def __str__(self) -> str:
        return str(self._value)

    def __repr__(self) -> str:
        return repr(self._value)


def _computing(name: str) -> Callable[..., Any]:
    def method(self: _Number, *others: Any) -> Any:
        if not all(type(other) in (int, float, _Number) for other in others):
            self._log.noted.append(name)
            return NotImplemented
        plain = [other._value if type(other) is _Number else other for other in others]
        ways = [self._value, float(self._value)]  # an int knows nothing of floats
        found = next((v for way in ways if (v := getattr(way, name)(*plain)) is not NotImplemented), NotImplemented)
        return found if found is NotImplemented else self._made(found)

    return method


def _asking(name: str) -> Callable[..., Any]:
    def method(self: _Number, *others: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "logging":  # which makes text of it
            self._log.noted.append(name)
        plain = [other._value if type(other) is _Number else other for other in others]
        return getattr(self._value, name)(*plain)

    return method


for _name in (*(f"__{side}{one}__" for one in _NUMBERS.split() for side in ("", "r")), *_ALONE):
    setattr(_Number, _name, _computing(_name))
for _name in _ASKING.split():
    setattr(_Number, f"__{_name}__", _asking(f"__{_name}__"))
