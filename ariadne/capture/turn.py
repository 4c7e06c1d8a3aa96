"""Turns: who captures a plan, or replaces attributes of torch's own classes, does so alone in the process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from ariadne.errors import UnsupportedError
from ariadne.forks import renewed, rlock, undone

_FOR_FORWARD = threading.local()  # `turn`: the one in which a forward ran that handed its work to this thread
_NEVER = 1 << 30  # collections of the younger objects before Python looks through the old ones, too


class Turn:
    """A block that one thread of the process at a time is in; it may enter again. Who takes other locks as well takes this first.

    Threads that are started from there, and work that is given to a pool, are known to be what a forward may wait for. Raises
    `UnsupportedError` in such a thread as long as the block lasts: both would wait forever.
    """

    def __init__(self) -> None:
        self._lock, self._depth = rlock(), 0
        self._number = 0  # of the turn that is, or of the last one
        self._end: Callable[[], object] = tuple
        renewed(self._renew)

    def __enter__(self) -> None:
        if self._is_waited_for():
            raise UnsupportedError(
                "forward has another thread prepare a split, or call one that needs a plan of its own, and only one thread at a "
                "time captures plans: they would wait for each other. Do that before you prepare, or in the thread of forward"
            )
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._number += 1
            ends = _hand_on(), _leave_the_old()
            self._end = lambda: [end() for end in ends]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._end()
        self._lock.release()

    def is_forwards(self) -> bool:
        """Whether this thread is in the block, or works for a forward that runs in it."""
        return self._is_mine() or self._is_waited_for()

    def working(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same for another thread, which works for a forward as long as this turn lasts."""
        turn = self._number

        def run(*args: Any, **kwargs: Any) -> Any:
            before, _FOR_FORWARD.turn = getattr(_FOR_FORWARD, "turn", None), turn
            try:
                return function(*args, **kwargs)
            finally:
                _FOR_FORWARD.turn = before

        return run

    def _is_mine(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _is_waited_for(self) -> bool:
        return self._depth > 0 and getattr(_FOR_FORWARD, "turn", None) == self._number and not self._is_mine()

    def _renew(self) -> None:
        if not self._is_mine():
            self._depth = 0


_TURN = Turn()


def capturing() -> Turn:
    """A block in which plans are captured, and held against the model, or torch's own classes are changed; see `Turn`."""
    return _TURN


def _leave_the_old() -> Callable[[], object]:
    """Have Python's garbage collector look at younger objects alone, until what this gives is called.

    Capturing makes some hundred objects for each op, which stay until it ends. Whenever they come to a quarter of what there was
    before, the collector would look through all of the process, most of which was imported: 0.7 s of 4.1 for 1,000 ops.
    """
    before = gc.get_threshold()
    meanwhile = (*before[:2], _NEVER)
    gc.set_threshold(*meanwhile)

    def put_back() -> None:
        if gc.get_threshold() == meanwhile:  # else forward has set others
            gc.set_threshold(*before)
        end()

    end = undone(put_back)
    return put_back


def _hand_on() -> Callable[[], object]:
    """Have threads that forward starts, and pools that it gives work to, know of that, until what this gives is called."""
    plain_submit, plain_start = ThreadPoolExecutor.submit, threading.Thread.start
    giving = set[int]()  # the threads that give work to a pool now: a worker that this starts serves others after it

    def submit(self: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        me = threading.get_ident()
        if not _TURN.is_forwards() or me in giving:
            return plain_submit(self, function, *args, **kwargs)
        giving.add(me)
        try:
            return plain_submit(self, _TURN.working(function), *args, **kwargs)
        finally:
            giving.discard(me)

    def start(self: threading.Thread) -> None:
        if _TURN.is_forwards() and threading.get_ident() not in giving:
            self.run = _TURN.working(self.run)  # type: ignore[method-assign]
        plain_start(self)

    def put_back() -> None:
        ThreadPoolExecutor.submit, threading.Thread.start = plain_submit, plain_start  # type: ignore[method-assign]
        end()

    end = undone(put_back)
    ThreadPoolExecutor.submit, threading.Thread.start = submit, start  # type: ignore[assignment,method-assign]
    return put_back
