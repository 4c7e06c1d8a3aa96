"""Parameters: what forward calls its inputs, so that a half takes them by position and by name, as its model does; and what may be
among them, or come out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.errors import HalfError
from ariadne.guards import signature_of
from ariadne.halves.atoms import flag, items, need, text, told

_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
_NUMBERS = (bool, int, float, complex)
_PLAIN = (type(None), bool, int, str)
_LONG, _MANY = 256, 256  # characters of a default, or digits; parameters
_UNTOLD = object()  # a default that a file has no words for


def told_parameters(model: nn.Module) -> list[Any] | None:
    """Name, kind and default of forward's parameters, as JSON-able data; None where only forward knows what it makes of a call."""
    asked = signature_of(model)
    return None if asked is None else [_told(p) for p in asked.parameters.values()]


def _told(p: inspect.Parameter) -> list[Any]:
    told = [p.name, _KINDS.index(p.kind), p.default is not p.empty]
    plain = type(p.default) in _PLAIN and len(str(p.default)) <= _LONG
    return [*told, p.default] if plain and told[2] else told


def told_value(value: Any) -> Any:
    """What goes into forward, or comes out of it, as JSON-able data: there a number of a class of its own is no other."""
    odd = next((v for v in tree.leaves(value) if isinstance(v, _NUMBERS) and type(v) not in _NUMBERS), None)
    if odd is not None:
        raise HalfError(
            f"an input or output of forward is {odd!r}, a number of the class {type(odd).__name__}, which can't be kept in a file; "
            "use a plain number, or run this half in a process that has the model"
        )
    return told(value)


def read_parameters(value: Any) -> inspect.Signature | None:
    """What `told_parameters` wrote."""
    if value is None:
        return None
    entries = items(value, "forward's parameters")
    need(len(entries) <= _MANY, "forward has too many parameters")
    try:
        return inspect.Signature([_read(items(entry, "a parameter")) for entry in entries])
    except ValueError as error:
        raise HalfError(
            f"this is not a half as Ariadne writes it: forward's parameters, {error}. Save it again, or refuse who sent it"
        ) from None


def _read(entry: list[Any]) -> inspect.Parameter:
    need(3 <= len(entry) <= 4 and type(entry[1]) is int and 0 <= entry[1] < len(_KINDS), "a parameter is malformed")
    has = flag(entry[2], "a default")
    need(has or len(entry) == 3, "a parameter has a default and has none")
    default = entry[3] if len(entry) == 4 else _UNTOLD if has else inspect.Parameter.empty
    need(len(entry) == 3 or type(default) in _PLAIN, "a default is malformed")
    return inspect.Parameter(text(entry[0], "a parameter"), _KINDS[entry[1]], default=default)


def stand_in(asked: inspect.Signature) -> Callable[..., Any]:
    """A forward with these parameters, that a half has in the place of its model's."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise HalfError("a half has no forward of its model. Call run_prefix or run_suffix")

    forward.__signature__ = asked  # type: ignore[attr-defined]
    return forward
