"""Errors of ops that forward itself may catch: the model goes on by a clause that no plan has."""

from __future__ import annotations

import dis
import linecache
import types
from collections.abc import Mapping
from itertools import pairwise, starmap

from torch import nn

from ariadne.errors import AriadneError, WitnessError, named
from ariadne.guards import codes_of


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
    codes = codes_of([(getattr(module, "forward", None), module)])
    return any("suppress" in code.co_names or _has_clause(code) for code in codes)


def _has_clause(code: types.CodeType) -> bool:
    """Whether code has an except clause, for some errors or for all, or ends a `with` by something that may be true; other `with`
    and a `finally` go on to raise."""
    if code.co_name == "__exit__" and any(starmap(_may_be_true, pairwise(dis.get_instructions(code)))):
        return True
    steps = [step.opname for step in dis.get_instructions(code)]
    return not {"CHECK_EXC_MATCH", "CHECK_EG_MATCH"}.isdisjoint(steps) or ("PUSH_EXC_INFO", "POP_TOP") in pairwise(
        steps
    )


def _may_be_true(before: dis.Instruction, one: dis.Instruction) -> bool:
    """Whether an instruction returns something that may be true; Python 3.12 and 3.13 return a constant in one instruction."""
    if one.opname == "RETURN_CONST":
        return bool(one.argval)
    return one.opname == "RETURN_VALUE" and (before.opname != "LOAD_CONST" or bool(before.argval))
