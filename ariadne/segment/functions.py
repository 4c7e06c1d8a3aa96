"""Segments: a side's source as a callable, with its lines known to tracebacks and debuggers."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

from ariadne.segment.codegen import Source

_numbers = itertools.count()


def load(source: Source, label: str) -> Callable[..., Any]:
    """The function that `source` defines; a traceback through it shows the generated lines under `label`.

    Where it asks questions, its attribute `halting` is the one that returns `Halted` where it would raise.
    """
    filename = f"<ariadne {source.name} {label} #{next(_numbers)}>"
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    function = _defined(source.text, filename, source)
    if source.halting:
        function.halting = _defined(source.halting, filename, source)  # type: ignore[attr-defined]
    return function


def halting(segment: Callable[..., Any]) -> Callable[..., Any]:
    """The same segment, which may return `Halted`; the segment itself where it has no such form, as that of a compiler."""
    found: Callable[..., Any] = getattr(segment, "halting", segment)
    return found


def _defined(text: str, filename: str, source: Source) -> Callable[..., Any]:
    namespace = dict(source.namespace)
    exec(compile(text, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace[source.name]
    return function
