"""Errors of ops that forward itself may catch: the model goes on by a clause that no plan has."""

from __future__ import annotations

import dis
import linecache
import types
from collections.abc import Mapping

from torch import nn

from ariadne.errors import AriadneError, WitnessError, named


def refuse_caught(error: Exception, modules: Mapping[str, nn.Module]) -> None:
    """Raise `WitnessError` where an op of a segment raised `error`, and a forward around that op has a clause for errors.

    The model may raise the same; only running it would tell. `modules`: those of the model, by path.
    """
    if isinstance(error, AriadneError):
        return
    line = _line(error.__traceback__)
    if line is None:
        return
    steps = line.partition("  # ")[2].split(".")
    for i in range(len(steps), -1, -1):
        path = ".".join(steps[:i])
        if path in modules and _catches(getattr(modules[path], "forward", None)):
            raise WitnessError(
                f"an op of {named(steps[0] and '.'.join(steps))} raised {type(error).__name__} ({str(error)[:200].rstrip('.')}), "
                f"and the forward of {named(path)} has an except clause, where the model may go on: at capture no error came. Run "
                'the model\'s own Python, prepare_split(..., fallback="python") with max_paths=1, or ask before the op instead'
            ) from error


def _line(trace: types.TracebackType | None) -> str | None:
    """The line of generated source that raised."""
    found = None
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith("<ariadne "):
            found = linecache.getline(name, trace.tb_lineno).rstrip("\n")
        trace = trace.tb_next
    return found


def _catches(forward: object) -> bool:
    """Whether a function, or one within it, has an except clause; a `with` has none."""
    code = getattr(forward, "__code__", None)
    todo = [code] if isinstance(code, types.CodeType) else []
    while todo:
        at = todo.pop()
        if any(step.opname == "CHECK_EXC_MATCH" for step in dis.get_instructions(at)):
            return True
        todo += [c for c in at.co_consts if isinstance(c, types.CodeType)]
    return False
