"""Several processes at once that prepare and compile, of which one at a time measures: meanwhile the others are stopped.

Compiling takes most of a process's time and none of it is measured in rounds, so that many cores serve many processes. What is
timed runs as if it were alone: the runner sends the other processes' groups SIGSTOP, and SIGCONT when it is done. What a stopped
process had queued on a device ends within moments.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ASK, GIVEN, DONE = b"?", b"!", b"."
LONGEST = 600.0  # seconds after which a turn ends, and the process with it
_POLL = 0.05


class Turns:
    """The runner's side: who runs, and whose turn it is."""

    def __init__(self) -> None:
        self._one = threading.Lock()  # held while one is alone, and while one is begun
        self._groups: set[int] = set()

    def begin(self, start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
        """Start a process, which leads a group of its own, when nobody is alone."""
        with self._one:
            child = start()
            self._groups.add(child.pid)
        return child

    def wait(self, child: subprocess.Popen[str], channel: socket.socket, limit: float) -> int:
        """Its exit status; gives it the turns that it asks for. Raises `subprocess.TimeoutExpired`."""
        end = time.monotonic() + limit
        try:
            while (code := child.poll()) is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise subprocess.TimeoutExpired(child.args, limit)
                if select.select([channel], [], [], min(left, _POLL))[0]:
                    if channel.recv(1) == ASK:
                        self._give(child, channel, end)
                    else:  # it has closed it, which it does as it ends
                        time.sleep(_POLL)
            return code
        finally:
            self._groups.discard(child.pid)

    def _give(self, child: subprocess.Popen[str], channel: socket.socket, end: float) -> None:
        while not self._one.acquire(timeout=_POLL):
            if time.monotonic() > end:
                return
        try:
            others = self._groups - {child.pid}
            _signal(others, signal.SIGSTOP)
            try:
                with suppress(BrokenPipeError, ConnectionResetError):
                    channel.send(GIVEN)
                    if select.select([channel], [], [], max(0.0, min(LONGEST, end - time.monotonic())))[0]:
                        channel.recv(1)  # DONE, or nothing: it died
                    else:  # what it went on to measure would not be measured alone
                        _signal({child.pid}, signal.SIGKILL)
            finally:
                _signal(others, signal.SIGCONT)
        finally:
            self._one.release()


def _signal(groups: set[int], number: int) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)


@contextmanager
def alone(channel: int | None) -> Iterator[None]:
    """The process's side: what runs in the block runs alone; `channel` is the descriptor that the runner gave (None: it is)."""
    if channel is None:
        yield
        return
    with socket.socket(fileno=os.dup(channel)) as asked:
        asked.sendall(ASK)
        if asked.recv(1) != GIVEN:
            raise RuntimeError("the runner has gone away before it gave a turn")
        try:
            yield
        finally:
            asked.sendall(DONE)
