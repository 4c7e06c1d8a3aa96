"""Context: the context variables that stand otherwise than at one moment, those of torch and of Ariadne left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ariadne import tree
from ariadne.guards import MISSING, lasts

_OTHERS = frozenset({"torch", "ariadne"})
_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def in_its_own_context(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """The function, each call of which sets context variables for itself alone."""

    @wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        return copy_context().run(function, *args, **kwargs)

    return run


def changed_variables(then: Context) -> Iterator[ContextVar[Any]]:
    """Those in which something else stands in this context than did in that one; a plain value that is equal is the same."""
    now = copy_context()
    for variable in dict.fromkeys((*then, *now)):
        was, found = then.get(variable, MISSING), now.get(variable, MISSING)
        same = was is found or (lasts(was) and lasts(found) and tree.identical(was, found))
        if not same and not _is_made_when_asked(variable, was) and not _is_others(variable):
            yield variable


def _is_made_when_asked(variable: ContextVar[Any], was: Any) -> bool:
    """Whether it is that of `decimal`, whose settings are made, as they are for all, where one asks for them first."""
    return was is MISSING and variable.name == "decimal_context"


def _is_others(variable: ContextVar[Any]) -> bool:
    """Whether it stands in a module of torch or of Ariadne, or is what a setting of torch's, or a change of some, is kept in."""
    if variable.name.startswith("torch.") and ".ConfigPatch[" in variable.name:
        return True
    tables = [getattr(m, "__dict__", {}) for name, m in [*sys.modules.items()] if name.partition(".")[0] in _OTHERS]
    settings = (
        setting for table in tables if type(found := table.get("_config")) is dict for setting in found.values()
    )
    kept = (getattr(setting, "user_override", None) for setting in settings)
    return any(thing is variable for table in tables for thing in [*table.values()]) or any(v is variable for v in kept)
