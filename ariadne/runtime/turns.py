"""Turns among threads: a backward pass that hooks leaves runs alone, all others run side by side.

Torch keeps the hooks of a leaf in a list without a lock. To add one while another thread's pass goes through that leaf ends the
process now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ariadne.forks import renewed


class Turns:
    """Who walks back: any number of threads at a time (`enter`, `leave`), or one of them `alone`.

    A walk within a walk of the same thread, as a hook may start one, belongs to the outer one's turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # entered by itself: a condition's own entrance is written in Python
        self._changed = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}  # how deep each thread is in
        self._waiting = 0  # who wants to be alone goes before those that come after
        self._asleep = (
            0  # how many threads there are to be told of a change: to tell nobody takes longer than a walk's turn
        )

    def enter(self) -> None:
        """Begin a walk that adds no hooks to leaves."""
        me = threading.get_ident()
        with self._lock:
            if me not in self._inside:
                while self._waiting:
                    self._sleep()
            self._inside[me] = self._inside.get(me, 0) + 1

    def leave(self) -> None:
        """End a walk."""
        me = threading.get_ident()
        with self._lock:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                if self._asleep:
                    self._changed.notify_all()

    def _sleep(self) -> None:
        """Wait for a change, until it is told."""
        self._asleep += 1
        try:
            self._changed.wait()
        finally:
            self._asleep -= 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While in the block, no other thread walks back through what Ariadne split."""
        me = threading.get_ident()
        with self._changed:
            nested = me in self._inside
            if not nested:
                self._waiting += 1
                while self._inside:
                    self._sleep()
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= not nested
            self.leave()

    def renew(self) -> None:
        """In a child that was forked: of those who were in, there is none but who forked."""
        me = threading.get_ident()
        deep = self._inside.get(me)
        self.__init__()  # type: ignore[misc]
        if deep is not None:
            self._inside[me] = deep


TURNS = Turns()
renewed(TURNS.renew)
