"""Segments: a side's source as a callable, with its lines known to tracebacks and debuggers."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ariadne.codegen import Source
from ariadne.errors import CompileError, SpecError
from ariadne.spec import COMPILE_OPTIONS

_numbers = itertools.count()


def load(source: Source, label: str) -> Callable[..., Any]:
    """The function that `source` defines; a traceback through it shows the generated lines under `label`."""
    filename = f"<ariadne {source.name} {label} #{next(_numbers)}>"
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    namespace = dict(source.namespace)
    exec(compile(source.text, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace[source.name]
    return function


def compiled(function: Callable[..., Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The function under `torch.compile` with these options; a failure to compile raises `CompileError`."""
    chosen = dict(options or {})
    unknown = sorted(set(chosen) - set(COMPILE_OPTIONS))
    if unknown:
        raise SpecError(
            f"compile_options has no {unknown[0]!r}; torch.compile takes {', '.join(map(repr, COMPILE_OPTIONS))}"
        )
    chosen.setdefault("dynamic", True)
    try:
        inner = torch.compile(function, **chosen)
    except Exception as error:  # an unknown backend or mode
        raise SpecError(f"torch.compile does not take {chosen}: {error}") from error

    def call(*args: Any) -> Any:
        try:
            return inner(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CompileError(
                f"torch.compile refused {function.__name__!r} with {chosen}: {error}. Use mode='generated_eager', or other "
                "compile_options"
            ) from error

    return call
