"""Python that a half calls: functions of autograd, and parts that `ariadne.opaque` was told of, by their names."""

from __future__ import annotations

from typing import Any

import torch

from ariadne.capture import Call
from ariadne.errors import HalfError
from ariadne.halves.atoms import Classes, count, flag, items, need, place, table, text, told_spec

_PART = ("at", "name", "given", "gives", "one", "tensors", "unwritten")


def told_object(thing: Any) -> list[Any]:
    """What an op calls, or takes, as JSON-able data; `HalfError` for what a file can't hold."""
    owner = getattr(thing, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return ["function", place(owner)]
    if isinstance(thing, torch.Generator):
        raise HalfError(
            "forward draws from a torch.Generator of the model's own, which a file can't hold; draw from torch's own"
        )
    if isinstance(thing, Call):
        return ["part", _told_part(thing)]
    return ["object", place(thing)]


def _told_part(part: Call) -> dict[str, Any]:
    if isinstance(part.function, torch.nn.Module):
        raise HalfError(
            f"{part.words} is a module of the model, which a file can't hold; make a function at the top of a module of it, and "
            "hand its weights over as arguments"
        )
    if part.moves:
        raise HalfError(
            f"{part.words} changes something in Python, or draws from Python's own generators, which a file can't hold; keep such "
            "state in tensors that it takes and gives, and draw from torch's RNG"
        )
    given, found = told_spec(part.given), place(part.function)
    return dict(
        zip(
            _PART,
            (found, part.name, given, part.gives, part.one, list(part.tensors), list(part.unwritten)),
            strict=True,
        )
    )


def read_object(data: Any, classes: Classes) -> Any:
    """What `told_object` wrote; only what `classes` allow is imported."""
    pair = items(data, "an object")
    need(len(pair) == 2 and pair[0] in ("function", "object", "part"), "an object is malformed")
    if pair[0] == "part":
        return _read_part(pair[1], classes)
    found = classes.find(pair[1], "a function that forward calls")
    if pair[0] == "object":
        return found
    need(
        isinstance(found, type) and issubclass(found, torch.autograd.Function),
        f"{pair[1]!r} is no autograd.Function",
    )
    return found.apply


def _read_part(data: Any, classes: Classes) -> Call:
    d = table(data, "an opaque part", _PART)
    given = classes.spec(d["given"])
    need(given.kind == "tuple" and [c.kind for c in given.children] == ["tuple", "dict"], "arguments are malformed")
    need(given.size <= 1024, "a part takes too many arguments")
    unwritten = tuple(count(i, "an argument", most=given.size - 1) for i in items(d["unwritten"], "arguments"))
    tensors = tuple(flag(one, "a result") for one in items(d["tensors"], "results"))
    one = flag(d["one"], "a result")
    need(not one or len(tensors) == 1, "a part gives one value and others")
    function = classes.find(d["at"], "an opaque part that forward calls")
    need(callable(function), f"{d['at']!r} can't be called")
    return Call(function, text(d["name"], "a part"), given, text(d["gives"], "results"), one, tensors, unwritten)
