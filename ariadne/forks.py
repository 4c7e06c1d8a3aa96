"""Forks: what another thread held or had replaced while the process was forked is free, and put back, in the child.

A child has but the thread that forked it. A lock that another one held would be held there for ever, and what that one had put in
the place of something for a moment would stand for good.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()
_undone: dict[int, tuple[int, Callable[[], object]]] = {}  # by number: the thread, and what puts back
_numbers = itertools.count()
_renewed: list[Callable[[], object]] = []


def rlock() -> threading.RLock:
    """A lock that a thread may take again, which is free in a child that another thread forks."""
    made = threading.RLock()
    _locks.add(made)
    return made


def undone(undo: Callable[[], object]) -> Callable[[], object]:
    """Have `undo` run in a child that another thread forks before what this gives is called."""
    number = next(_numbers)
    _undone[number] = threading.get_ident(), undo
    return partial(_undone.pop, number, None)


def renewed(renew: Callable[[], object]) -> None:
    """Have this run in each child, once its locks are free."""
    _renewed.append(renew)


def _in_child() -> None:
    me = threading.get_ident()
    for lock in [*_locks]:
        if not lock._is_owned():
            lock._at_fork_reinit()
    for renew in _renewed:
        renew()
    for number in sorted(_undone, reverse=True):  # what was put last goes first
        thread, undo = _undone[number]
        if thread != me:
            del _undone[number]
            undo()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_child)
