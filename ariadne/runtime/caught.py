"""Errors of ops that forward itself may catch: the model goes on by a clause that no plan has."""

from __future__ import annotations

import dis
import linecache
import types
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

from torch import nn

from ariadne.errors import AriadneError, WitnessError, named

_MOST = 200  # functions that are looked into


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
        if path in modules and _catches(modules[path]):
            raise WitnessError(
                f"an op of {named(steps[0] and '.'.join(steps))} raised {type(error).__name__} ({str(error)[:200].rstrip('.')}), "
                f"and the forward of {named(path)} has an except clause, where the model may go on: at capture no error came. Ask "
                "before the op; or run the model's own Python, for which this call has to be an example: prepare_split(..., "
                'fallback="python", more_examples=[...])'
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


def _catches(module: nn.Module) -> bool:
    """Whether a module's forward, or a function of the user's that it has a name for, may go on after an error."""
    forward = getattr(module, "forward", None)
    todo, seen = [getattr(forward, "__func__", forward)], set[object]()
    while todo and len(seen) < _MOST:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or function in seen or _is_of_torch(function):
            continue
        seen.add(function)
        codes = [function.__code__]
        for code in codes:
            if "suppress" in code.co_names or _has_clause(code):
                return True
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
            todo += [
                found for n in code.co_names for found in (function.__globals__.get(n), getattr(type(module), n, None))
            ]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                todo.append(cell.cell_contents)
    return False


def _is_of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _has_clause(code: types.CodeType) -> bool:
    """Whether code has an except clause, for some errors or for all; a `with` and a `finally` go on to raise."""
    steps = [step.opname for step in dis.get_instructions(code)]
    return "CHECK_EXC_MATCH" in steps or ("PUSH_EXC_INFO", "POP_TOP") in pairwise(steps)
