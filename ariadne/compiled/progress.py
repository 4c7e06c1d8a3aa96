"""A line on a terminal that says what is done for each side while it is compiled, and for how long."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from ariadne.compiled.jit import SegmentReport

_FIRST, _EACH = 1.0, 0.5  # seconds to the first line, for what is loaded needs none, and between two


def told(reports: Sequence[SegmentReport], now: float | None) -> str:
    """What is done for segments, with the seconds since it began until `now`.

    >>> told(runtime.report().segments, time.monotonic())
    'prefix: C++ 12 s, suffix: lowering 2 s'
    """
    busy = [s for s in reports if s.stage]
    return ", ".join(f"{s.side}: {s.stage}{'' if now is None else f' {now - s.since:.0f} s'}" for s in busy)


class Progress:
    """While it lasts, a thread writes to stderr what is done for the segments of `reports`.

    `shown`: always, never, or where it is None on a terminal alone. There it is one line, written anew each half second, which goes
    in the end; elsewhere a line for each change.
    """

    def __init__(self, reports: Callable[[], Sequence[SegmentReport]], shown: bool | None = None) -> None:
        self._reports, self._over, self._last = reports, threading.Event(), ""
        stream: TextIO | None = sys.stderr  # None where a program has no console
        self._terminal = stream is not None and stream.isatty()
        self._stream = stream if shown or (shown is None and self._terminal) else None
        self._thread = threading.Thread(target=self._show, name="ariadne progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._stream is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        if self._stream is not None:
            self._thread.join()

    def _show(self) -> None:
        try:
            wait = _FIRST
            while not self._over.wait(wait):
                self._write(told(self._reports(), time.monotonic() if self._terminal else None))
                wait = _EACH
            if self._terminal:
                self._write("")
        except (OSError, ValueError):  # nobody reads stderr any more
            return

    def _write(self, text: str) -> None:
        line = f"ariadne: compiling, {text}" if text else ""
        if line == self._last or self._stream is None:
            return
        if self._terminal:
            line = line[: max(1, shutil.get_terminal_size().columns - 1)]
            self._stream.write(f"\r{line.ljust(len(self._last))}" + ("" if line else "\r"))
        elif line:
            self._stream.write(f"{line}\n")
        self._stream.flush()
        self._last = line
