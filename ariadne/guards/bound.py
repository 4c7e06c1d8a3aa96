"""Bound: a call in the form of the example's: its arguments came by name where that had them by position, or the other way, or a
default of forward's was passed where that left it out, or the other way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import accumulate, zip_longest
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.guards.attributes import lasts
from ariadne.plan import TracePlan

Form = tuple[tuple[Any, ...], dict[str, Any]]
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ROWS = ("list", "tuple")


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """Forward's parameters, where a call means the same in each form that Python lets it have; else None.

    To forward itself all are one, as to any function of Python's without `*args` and `**kwargs`. A hook on the model, or what a
    decorator puts around forward, may tell them apart.
    """
    if model._forward_pre_hooks or model._forward_hooks or type(model).__call__ is not nn.Module.__call__:
        return None
    try:
        asked = inspect.signature(model.forward, follow_wrapped=False)
    except (TypeError, ValueError):  # no function of Python's
        return None
    return None if any(p.kind in _OPEN for p in asked.parameters.values()) else asked


def binding(
    model: nn.Module, spec: tree.Spec, further: bool = False
) -> Callable[[tuple[Any, ...], dict[str, Any]], Form | None]:
    """A function from (args, kwargs) to the same call in the form of `spec`; None where it has that form, or can't have it.

    With `further` arguments a call has these by their names.
    """
    asked = signature_of(model)
    if asked is None:
        return lambda args, kwargs: None
    positional, keyword = spec.children
    first, named = [*asked.parameters][: len(positional.children)], [*keyword.keys]
    wanted = {*first, *named}

    def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form | None:
        if len(args) == len(first) and kwargs.keys() == {*named}:
            return None
        try:
            given = dict(asked.bind(*args, **kwargs).arguments)
        except TypeError:  # forward would refuse it, too
            return None
        for name, p in asked.parameters.items():
            if name in given and name not in wanted and _is_default(given[name], p.default):
                del given[name]  # forward finds the same there
            elif name in wanted and name not in given and lasts(p.default):
                given[name] = p.default
        if given.keys() != wanted:
            more = given.keys() - {*first}
            unnamed = [name for name in more if asked.parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY]
            if not further or unnamed or not given.keys() >= {*first}:
                return None
            return tuple(given[name] for name in first), {name: given[name] for name in given if name in more}
        return tuple(given[name] for name in first), {name: given[name] for name in named}

    return bound


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (lasts(default) and tree.identical(value, default))


def in_order(model: nn.Module, spec: tree.Spec) -> tuple[str, ...]:
    """The keyword inputs of a call in this form that forward meets in the order in which they came, where there are several.

    Those are what `**kwargs` takes; where a hook on the model is given them, all. What `functools.wraps` puts around forward hands
    them on as they are.
    """
    named: tuple[str, ...] = spec.children[1].keys
    if not (model._forward_pre_hooks_with_kwargs or model._forward_hooks_with_kwargs):
        try:
            asked = inspect.signature(model.forward).parameters
        except (TypeError, ValueError):  # no function of Python's
            return ()
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in asked.values()):
            return ()
        named = tuple(name for name in named if name not in asked)
    return named if len(named) > 1 else ()


def matched(found: tree.Spec, known: tree.Spec) -> list[int | None]:
    """For each leaf of a call, which of the leaves of a known one it is; None where that has another structure, or nothing.

    Those of one dict may come in any order, and a list stands where a tuple did: what both have is at one place.

    >>> matched(tree.flatten({"b": 1, "c": 2, "a": 3})[1], tree.flatten({"a": 3, "b": 1})[1])
    [1, None, 0]
    >>> matched(tree.flatten((1, [2, 3], 4))[1], tree.flatten((1, (2,), [3]))[1])
    [0, 1, None, None]
    """
    return _matched(found, known, 0)


def _matched(found: tree.Spec, known: tree.Spec, start: int) -> list[int | None]:
    if found.kind == known.kind == tree.LEAF:
        return [start]
    if found.kind in _ROWS and known.kind in _ROWS:
        places = {i: i for i in range(len(known.children))}
    elif (found.kind, found.cls, found.context) != (known.kind, known.cls, known.context) or found.kind == tree.LEAF:
        return [None] * found.size
    else:
        places = {key: i for i, key in enumerate(known.keys or range(len(known.children)))}
    at: list[int | None] = []
    for key, child in zip(found.keys or range(len(found.children)), found.children, strict=True):
        i = places.get(key)
        begins = start + sum(c.size for c in known.children[: i or 0])
        at += [None] * child.size if i is None else _matched(child, known.children[i], begins)
    return at


def differ_in_keys_alone(found: tree.Spec, known: tree.Spec) -> bool:
    """Whether two structures are one, but for keys of dicts that one of them lacks, or has elsewhere."""
    if (found.kind, found.cls, found.context) != (known.kind, known.cls, known.context):
        return False
    if found.kind in ("dict", "mapping"):
        theirs = dict(zip(known.keys, known.children, strict=True))
        pairs = [(c, theirs[key]) for key, c in zip(found.keys, found.children, strict=True) if key in theirs]
    elif found.keys != known.keys or len(found.children) != len(known.children):
        return False
    else:
        pairs = [*zip(found.children, known.children, strict=True)]
    return all(differ_in_keys_alone(*pair) for pair in pairs)


def accepts(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether forward takes a call of so many arguments of these names, which a hook or a decorator may still change."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it does not, or it is no function of Python's
        return False
    return True


def as_before(
    model: nn.Module, plan: TracePlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call in the example's form, with keywords in the example's order where forward can't see in which order they came."""
    args, kwargs = binding(model, plan.input_spec, further=True)(args, dict(kwargs)) or (args, dict(kwargs))
    kwargs = {key: value for key, value in kwargs.items() if value is not None or not _has_no(model, plan, key)}
    keys = plan.input_spec.children[1].keys
    if kwargs.keys() == {*keys} and not plan.assumption.order:
        kwargs = {key: kwargs[key] for key in keys}
    return args, kwargs


def _has_no(model: nn.Module, plan: TracePlan, key: str) -> bool:
    """Whether None under a keyword says that a tensor is left out which the plan has there."""
    positional, keyword = plan.input_spec.children
    at = dict(zip(keyword.keys, accumulate((c.size for c in keyword.children), initial=positional.size), strict=False))
    name = dict(plan.inputs).get(at.get(key, -1))
    if name is None or plan.values[name].kind != "input":
        return False
    return _defaults(model).get(key, key) is None


def _defaults(model: nn.Module) -> dict[str, Any]:
    """The defaults of forward's parameters, in order; nothing where it is no function of Python's."""
    try:
        return {name: p.default for name, p in inspect.signature(model.forward).parameters.items()}
    except (TypeError, ValueError):
        return {}


def may_be_none(model: nn.Module, spec: tree.Spec) -> set[int]:
    """The leaves of a call in this form that may be None: those in containers, and where forward has None unless told otherwise."""
    positional, keyword = spec.children
    found, start = set[int](), 0
    inputs, defaults = (
        (*positional.children, *keyword.children),
        [*_defaults(model).values()][: len(positional.children)],
    )
    for child, default in zip_longest(inputs, defaults, fillvalue=spec):
        if child.kind != tree.LEAF or default is None:
            found |= {*range(start, start + child.size)}
        start += child.size
    return found


def once_more(model: nn.Module, spec: tree.Spec, names: dict[str, Any]) -> Callable[..., tuple[Any, ...] | None]:
    """A function that calls `names["enter"]` with a call in the form of `spec`; it gives None where there is none."""
    bound = binding(model, spec)

    def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        form = bound(args, kwargs)
        return None if form is None else names["enter"](*form)

    return again
