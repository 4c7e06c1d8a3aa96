"""What Python and the processor keep for each thread: handed on between a caller and the thread in which its forward runs.

The whole model runs in the thread that calls it, so its forward finds there what the caller keeps in `threading.local` objects, and
leaves there what it puts into them. Here the two have a thread each. While one of them runs the other waits, so what is in these
objects is copied at each hand-over: to forward where it begins and goes on, and to the caller where it stops, ends or raises.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import is_not
from types import ModuleType
from typing import Any

import torch

from ariadne import tree
from ariadne.errors import UnsupportedError
from ariadne.guards import simple

_MISSING = object()
_TINY = 5e-324
_contents: Callable[[threading.local, str], Any] = threading.local.__getattribute__
_set_loop: Any = asyncio._set_running_loop
_loop_here: Callable[[], Any] = asyncio._get_running_loop
_swap_task: Any = getattr(
    asyncio.tasks, "_swap_current_task", None
)  # by thread since Python 3.14; before, all threads see it


class NewlyFound(UnsupportedError):
    """Forward used a `threading.local` that nothing had led to; from now on it is known."""


@dataclass(slots=True)
class _Known:
    """A `threading.local`, by a weak reference, with Python's own table of what it holds by thread, where that can be had.

    `carried`: each forward gets it. A class with an `__init__` of its own runs that when a thread comes by for the first time, so
    such a one goes only to forwards whose model leads to it, until one has used it that did not.
    """

    local: weakref.ref[threading.local]
    table: dict[Any, Any] | None
    carried: bool


_known: dict[int, _Known] = {}  # by id
_set_aside: dict[int, weakref.ref[threading.local]] = {}  # those of libraries of which no result follows
_modules = [0]  # how many there were when these were looked for
_LIBRARIES = frozenset({"ariadne", "torch", "sympy", *sys.stdlib_module_names})


def look_for_all() -> None:
    """Get to know the `threading.local` objects that there are: some 40 ms beside 300,000 objects that Python keeps track of."""
    kinds: set[type] = {threading.local}
    ahead: list[type] = [threading.local]
    while ahead:
        below: list[type] = type.__subclasses__(ahead.pop())
        kinds.update(below)
        ahead += below
    every = gc.get_objects()
    found = compress(every, map(kinds.__contains__, map(type, every)))
    new = [one for one in found if not (_is_known(one) or _set_aside.get(id(one), _nothing)() is one)]
    if new and _modules[0] != len(sys.modules):
        _modules[0] = len(sys.modules)
        _set_aside.update((id(one), weakref.ref(one)) for one in _of_libraries())
    _get_to_know([one for one in new if _set_aside.get(id(one), _nothing)() is not one])


def _get_to_know(found: Iterable[threading.local]) -> None:
    for local in found:
        if _is_known(local):
            continue
        plain = _has_no_init(local)
        if plain:
            _contents(local, "__dict__")
        at = id(local)
        _known[at] = _Known(weakref.ref(local, partial(_forget, at)), _table_of(local), plain)


def _of_libraries() -> Iterator[threading.local]:
    """Those in variables of modules and classes of torch and the like: torch's modes are handed on as such, and of the rest no
    result follows.
    """
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in _LIBRARIES and type(module) is ModuleType:
            for thing in [*vars(module).values()]:
                held = [*vars(thing).values()] if type(thing) is type and thing.__module__ == name else [thing]
                yield from (one for one in held if issubclass(type(one), threading.local))


def _nothing() -> None:
    return None


def _is_known(local: threading.local) -> bool:
    known = _known.get(id(local))
    return known is not None and known.local() is local


def _forget(at: int, gone: Any) -> None:
    known = _known.get(at)
    if known is not None and known.local is gone:
        _known.pop(at, None)


def _table_of(local: threading.local) -> dict[Any, Any] | None:
    """What CPython keeps by thread for one of these: a dict, to which a thread is added last when it first comes by."""
    found = [one for one in gc.get_referents(local) if type(one) is dict] if _HAS_TABLES else []
    return found[-1] if found else None


def _has_tables() -> bool:
    """Whether this Python keeps them so."""
    probe = threading.local()
    probe.here = 1
    found = [one for one in gc.get_referents(probe) if type(one) is dict]
    return bool(found) and [*found[-1].values()] == [_contents(probe, "__dict__")]


_HAS_TABLES = _has_tables()


def _latest(table: dict[Any, Any] | None) -> Any:
    """The thread that came by last; a new thing where that can't be told."""
    if table is None:
        return object()
    keys = (*table,)
    return keys[-1] if keys else None


def _carried(found: Iterable[threading.local]) -> list[tuple[threading.local, Any, bool]]:
    """All that are known, with their tables, and whether they are handed on, as those are that were `found`."""
    led_to = {id(local): local for local in found}
    _get_to_know(led_to.values())
    every = [(local, known) for known in [*_known.values()] if (local := known.local()) is not None]
    return [(local, known.table, known.carried or id(local) in led_to) for local, known in every]


class Handed:
    """What one forward and its callers hand each other. Made in the thread of the first caller, with what was `found` besides.

    `lend` runs in the thread of each caller; `take` and `give` in that of forward, while the caller waits.
    """

    def __init__(self, found: Iterable[threading.local] = ()) -> None:
        every = _carried(found)
        self._locals = [one for one, _, carried in every if carried]
        self._tables = [table for _, table, carried in every if carried]
        self._apart = [(one, table) for one, table, carried in every if not carried]
        self._stood: list[dict[str, Any]] = [{}] * len(self._locals)  # what both held at the last hand-over
        self._written: dict[int, set[str]] = {}  # by number: what forward has put there
        self._inside: set[int] = set()  # those into which forward's thread has come
        self._late: list[tuple[threading.local, dict[str, Any]]] = []
        self.dropped = self._began = False
        self.lend()
        # Of each, the dict of the caller that was taken last: of what holds nothing there is nothing to take.
        plain = [not theirs and _has_no_init(one) for one, theirs in zip(self._locals, self._theirs, strict=True)]
        self._had: list[Any] = [theirs if empty else None for theirs, empty in zip(self._theirs, plain, strict=True)]

    def lend(self) -> None:
        """Note what the calling thread has."""
        self._theirs = [_contents(local, "__dict__") for local in self._locals]
        self._loop = _loop_here()
        self._task = asyncio.current_task(self._loop) if self._loop is not None and _swap_task is not None else None
        self._registers = self._found = registers()

    def take(self) -> None:
        """Have in this thread what the caller has; what forward has put there, it finds as it left it."""
        for i, theirs in enumerate(self._theirs):
            if theirs is not self._had[i] or not _same(theirs, self._stood[i]):
                self._take(i, theirs)
        _set_loop(self._loop)
        if self._task is not None and asyncio.current_task(self._loop) is not self._task:
            _swap_task(self._loop, self._task)
        _set_registers(self._registers)
        self._latest = [*map(_latest, self._tables)]
        self._latest_apart = [_latest(table) for _, table in self._apart]
        self._began = True

    def _take(self, i: int, theirs: dict[str, Any]) -> None:
        was, self._had[i] = self._had[i], theirs
        mine = self._mine(self._locals[i])
        self._inside.add(i)
        if was is None:
            mine.clear()
            mine.update(theirs)
        elif was is theirs:
            for name, value in _moved(self._stood[i], theirs):
                _put(mine, name, value)
        else:  # the dict of another thread: forward keeps to the one that it began in
            for name, value in theirs.items():
                mine.setdefault(name, value)
        self._stood[i] = dict(mine)

    def _mine(self, local: threading.local) -> dict[str, Any]:
        try:
            found: dict[str, Any] = _contents(local, "__dict__")
        except Exception as error:  # whatever its __init__ raises
            raise UnsupportedError(
                f"a Python split runs forward in a thread of its own, where {type(local).__qualname__}, a threading.local, "
                f"can't be made: {type(error).__name__}: {error}. Keep such state in a context variable, or in one without an "
                "__init__ of its own"
            ) from error
        return found

    def give(self) -> None:
        """Let the caller have what forward has put there since; where it was `dropped`, only where nobody else has since."""
        if not self._began:
            return
        moved = map(is_not, map(_latest, self._tables), self._latest)
        for i in self._inside.union(compress(range(len(self._locals)), moved)):
            mine, theirs, stood = _contents(self._locals[i], "__dict__"), self._theirs[i], self._stood[i]
            if _same(mine, stood):
                continue
            self._inside.add(i)
            for name, value in [*_moved(stood, mine)]:
                was = theirs.get(name, _MISSING)
                if not self.dropped or was is stood.get(name, _MISSING):
                    _put(theirs, name, value)
                    self._written.setdefault(i, set()).add(name)
            self._stood[i], self._had[i] = dict(mine), theirs
        for (local, table), latest in zip(self._apart, self._latest_apart, strict=True):
            now = _latest(table)
            if now is not latest and (mine := self._came_by(local, table, now)) is not None:
                self._late.append((local, dict(mine)))
        _set_loop(None)
        self._found, self._registers = self._registers, registers()

    @staticmethod
    def _came_by(local: threading.local, table: Any, now: Any) -> dict[str, Any] | None:
        """What this thread has there, where forward was there; another thread may have come by as well."""
        try:
            mine: dict[str, Any] = _contents(local, "__dict__")
        except Exception:  # its own __init__ raises: so forward has nothing there
            return None
        return mine if table is None or _latest(table) is now else None

    def settle(self) -> None:
        """In the thread of the caller, when forward has given: raises `NewlyFound` where it used what was not handed on to it."""
        if self._registers[0] is not self._found[0]:
            torch.set_flush_denormal(self._registers[0])
        if self._registers[1] != self._found[1]:
            torch.set_num_threads(self._registers[1])
        late, self._late = self._late, []
        if not late:
            return
        for local, mine in late:
            _known[id(local)].carried = True
            theirs = _contents(local, "__dict__")
            if any(not _alike(value, theirs.get(name, _MISSING)) for name, value in _moved(theirs, mine)):
                raise NewlyFound(
                    f"forward used a threading.local, a {type(local).__qualname__}, to which nothing of the model had led before, "
                    "so in the thread in which forward runs it was not as it is in yours. From now on it is: run the prefix again"
                )

    def moved(self) -> str | None:
        """What was changed since forward stopped of what it left to its caller, in words; None where nothing was."""
        if registers()[0] is not self._registers[0]:
            return "torch.set_flush_denormal"
        for i, names in self._written.items():
            had, stood = _contents(self._locals[i], "__dict__"), self._stood[i]
            for name in names if had is self._had[i] else ():  # in another thread it keeps its own
                if not _alike(had.get(name, _MISSING), stood.get(name, _MISSING)):
                    return (
                        f"{self._called(i, name)}, into which the prefix had put something, by another call or by you"
                    )
        return None

    def written(self) -> Iterator[str]:
        """What forward has put into them, in words."""
        return (self._called(i, name) for i, names in self._written.items() for name in names)

    def _called(self, i: int, name: str) -> str:
        return f"{name!r} of a threading.local ({type(self._locals[i]).__qualname__})"


def _has_no_init(local: threading.local) -> bool:
    return type(local).__init__ is object.__init__


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and simple(one) and tree.identical(one, other))


def _same(now: dict[str, Any], was: dict[str, Any]) -> bool:
    if len(now) != len(was):
        return False
    return not was or not any(now.get(name, _MISSING) is not value for name, value in was.items())


def _moved(was: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What stands otherwise now, or is gone: the names, with what stands there."""
    yield from ((name, value) for name, value in now.items() if was.get(name, _MISSING) is not value)
    yield from ((name, _MISSING) for name in was if name not in now)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(name, None)
    else:
        table[name] = value


@contextmanager
def put_back(found: Iterable[threading.local]) -> Iterator[None]:
    """Have what this thread has in those that are handed on, with what was `found`, be after the block as it was before."""
    held = [
        (table, dict(table)) for table in (_contents(one, "__dict__") for one, _, carried in _carried(found) if carried)
    ]
    try:
        yield
    finally:
        for table, was in held:
            if not _same(table, was):
                table.clear()
                table.update(was)


# --- the processor, and what computes ---------------------------------------------------------------------------------


def registers() -> tuple[bool, int]:
    """Whether this thread makes the smallest numbers zero (`torch.set_flush_denormal`), and how many threads its ops may take."""
    return _TINY * 1.0 == 0.0, torch.get_num_threads()


def _set_registers(wanted: tuple[bool, int]) -> None:
    """Have them so in this thread."""
    flushes, threads = wanted
    if (_TINY * 1.0 == 0.0) is not flushes:
        torch.set_flush_denormal(flushes)
    others = torch.get_num_threads()
    if others != threads:
        # Torch has one number for threads to come and one for each that is there: both are set. The first is the process's.
        torch.set_num_threads(threads)
        there = threading.Thread(target=torch.set_num_threads, args=(others,))
        there.start()
        there.join()


# --- locks ------------------------------------------------------------------------------------------------------------

LOCKS = (type(threading.RLock()), threading._RLock)


def held_of(locks: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Those of these locks, with where they stand, that this thread holds."""
    return (one for one in locks if one[1]._is_owned())


def refuse_held(locks: Sequence[tuple[str, Any]], read: Callable[[], frozenset[str]]) -> None:
    """Raise `UnsupportedError` where this thread holds one of these locks, with where they stand, and forward may take it again.

    `read` tells the names that the model's code may read; what runs at each call is asked for by none.
    """

    def leads(where: str) -> bool:
        name = where.rpartition(".")[2]
        return " " in where or name == "forward" or name.endswith("_hooks") or name in read()

    what = next((where for where, _ in held_of(locks) if leads(where)), None)
    if what is not None:
        raise UnsupportedError(
            f"this thread holds the RLock {what!r}, which forward may take again: as a whole the model could, but a Python split "
            "runs it in a thread of its own, which would wait for yours for ever. Call it without that lock, or hold another one "
            "that forward does not use"
        )
