"""Segments: a side's source as a callable, with its lines known to tracebacks and debuggers."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

from ariadne.segment.codegen import Source

_numbers = itertools.count()


def load(source: Source, label: str) -> Callable[..., Any]:
    """The function that `source` defines; a traceback through it shows the generated lines under `label`."""
    filename = f"<ariadne {source.name} {label} #{next(_numbers)}>"
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    namespace = dict(source.namespace)
    exec(compile(source.text, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace[source.name]
    return function
