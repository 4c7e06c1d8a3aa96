"""Given: an input that is neither a tensor nor a plain value, with what it held at capture, so that a change in place is seen."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Collection
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from ariadne import tree
from ariadne.errors import InputError
from ariadne.guards.attributes import LEAVES, held, is_a, is_array, is_opaque, kind_of, lasts


class Given:
    """An input, and all that it held at one moment, as far as that can be seen from Python.

    Plain values and arrays count by what they are, tensors and modules by which they are: a plan reads their data anew.
    """

    def __init__(self, thing: Any, put: Collection[tuple[int, Any]] = ()) -> None:
        """`put`: the id of each object inside and the step at which forward itself puts something; None for all of a list."""
        self.thing, self._put = thing, put
        self._seen: dict[int, int] = {}
        self._held = self._look(thing)

    def __repr__(self) -> str:
        return repr(self.thing)

    def _look(self, value: Any) -> tuple[Any, ...]:
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        if lasts(value):
            return "plain", value
        if is_array(value) or hasattr(type(value), "tobytes"):
            return "data", _data(value)
        if type(value) is FunctionType:
            return "function", value, value.__code__, value.__defaults__, dict(value.__kwdefaults__ or {})
        if is_a(value, torch.Tensor) or type(value) in LEAVES:
            return "same", value
        if is_opaque(value) or not (kind_of(value) or is_a(value, (tuple, frozenset))):
            # A view of a dict has a hash from Python 3.12 on, and shows other things once the dict is written.
            changes = type(value).__hash__ is None or is_a(value, MappingProxyType)
            return ("equal", _copied(value)) if changes else ("same", value)
        self._seen[id(value)] = len(self._seen)
        if (id(value), None) in self._put:
            return "any", type(value)
        if is_a(value, (set, frozenset)):
            return ("set", type(value), {*value}) if all(map(lasts, value)) else ("set", type(value), [*map(id, value)])
        put = {step for at, step in self._put if at == id(value)}
        steps = [(s, v) for s, v in held(value) if s not in put]
        return "held", type(value), tuple(s for s, _ in steps), tuple(self._look(v) for _, v in steps), put

    def same(self, now: Any) -> bool:
        """Whether an input is this one, or one like it, with the same in it."""
        return _matches(now, self._held, [])


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever a class raises
        raise InputError(
            f"an input holds a {type(value).__name__}, {reprlib.repr(value)}, which can't be copied ({error}): what is in it is "
            "part of the plan, and nothing would tell whether it is another at the next call. Pass a dict or a tuple in its place"
        ) from error


_KINDS = ("dtype", "typecode", "format", "shape", "strides")  # of a numpy array, an array of Python's, a memoryview


def _data(value: Any) -> tuple[Any, ...]:
    if getattr(getattr(value, "dtype", None), "kind", "") == "O":
        return (type(value), value.shape, value.ravel().tolist())
    return (type(value), *(getattr(value, name, None) for name in _KINDS), value.tobytes())


def _matches(now: Any, then: tuple[Any, ...], seen: list[Any]) -> bool:
    kind, *rest = then
    if kind == "again":
        return rest[0] < len(seen) and now is seen[rest[0]]
    if kind == "plain":
        return tree.identical(now, rest[0])
    if kind == "data":
        return (is_array(now) or hasattr(type(now), "tobytes")) and tree.identical(_data(now), rest[0])
    if kind == "same":
        return now is rest[0] or (not is_a(now, torch.Tensor) and tree.identical(now, rest[0]))
    if kind == "function":
        alike = now is rest[0] and now.__code__ is rest[1] and now.__defaults__ is rest[2]
        return alike and tree.identical(now.__kwdefaults__ or {}, rest[3])
    if kind == "equal":
        return tree.identical(now, rest[0])
    if type(now) is not rest[0]:
        return False
    seen.append(now)
    if kind == "any":
        return True
    if kind == "set":
        return tree.identical({*now}, rest[1]) if is_a(rest[1], set) else [*map(id, now)] == rest[1]
    steps = [(s, v) for s, v in held(now) if s not in rest[3]]
    return tree.identical(tuple(s for s, _ in steps), rest[1]) and all(
        _matches(value, was, seen) for (_, value), was in zip(steps, rest[2], strict=True)
    )
