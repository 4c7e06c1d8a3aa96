"""Whole: parts of a model that are taken as they are, one op of the plan each, and not looked into.

A module carries a mark, itself or by its class. A function is wrapped in one that calls `Taken.run`, in whose place a recorder puts
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from ariadne.errors import SpecError
from ariadne.guards.attributes import is_a

MARK = "__ariadne_opaque__"
_Part = TypeVar("_Part")


def opaque(part: _Part) -> _Part:
    """Take a part of a model as it is: each call of it is one op of a plan, run at replay, and not looked into.

    `part`: a module, a class of modules, a function or a method. A module or a class is marked, and given back; a function is
    wrapped in one that calls it. Outside of a capture nothing is different. What the part gives must be tensors, numbers and
    strings, in plain containers; its Python may do what it likes: numpy, counters, branches, code in C.

    Raises `SpecError` for what can't be called.

    >>> model.post = ariadne.opaque(model.post)
    >>> prepare_split(model, (x,), split="after:post")
    """
    thing: Any = part
    if is_a(thing, nn.Module):
        thing.__dict__[MARK] = True
        return part
    if is_a(thing, type) and issubclass(thing, nn.Module):
        setattr(thing, MARK, True)
        return part
    if is_a(thing, (staticmethod, classmethod)):
        return type(thing)(opaque(thing.__func__))  # type: ignore[no-any-return]
    if is_a(thing, MethodType):  # so that a copy of the model has one of its own
        return MethodType(opaque(thing.__func__), thing.__self__)  # type: ignore[return-value]
    if is_a(thing, type) or not callable(thing):
        raise SpecError(
            f"ariadne.opaque takes a module, a class of modules, or a function; found {thing!r}. Write ariadne.opaque(model.part), "
            "or @ariadne.opaque before the function"
        )

    @wraps(thing)
    def whole(*args: Any, **kwargs: Any) -> Any:
        return Taken.run(whole, thing, args, kwargs)

    return whole  # type: ignore[return-value]


class Taken:
    """How a wrapped function is run."""

    @staticmethod
    def run(whole: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function gives that is known as `whole`; a recorder notes it as one op."""
        return function(*args, **kwargs)


def is_whole(module: nn.Module) -> bool:
    """Whether a module is taken as it is."""
    return MARK in module.__dict__ or getattr(type(module), MARK, False)


def looked_into(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that are not taken as they are, nor part of one that is; with their paths, some more than once."""
    if is_whole(model):
        return
    yield path, model
    for name, child in model._modules.items():
        if child is not None:
            yield from looked_into(child, f"{path}.{name}" if path else name)
