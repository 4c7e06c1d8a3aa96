"""Told: what stands in a thing, as plain values that two first calls can be compared by.

Keys and nesting, kinds and classes, the content of tensors and arrays, the code of functions: all that a later call may ask for.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.guards.attributes import SIMPLE, held, is_a, is_array
from ariadne.guards.functions import contents
from ariadne.plan import as_bytes

_MOST, _DEEP = 4096, 8  # so many things, so deep, are told
_MASKED, _DIGITS = "…", re.compile(r"\d+")
_ORDERED = (list, tuple, deque)


def told_of(value: Any) -> Any:
    """What stands in a value: itself, if it is plain; else a tuple that begins with the name of its class."""
    return _Telling().told(value, _DEEP)


class _Telling:
    def __init__(self) -> None:
        self.left = _MOST

    def told(self, value: Any, depth: int) -> Any:
        if is_a(value, SIMPLE):
            return value
        kind = type(value).__qualname__
        self.left -= 1
        if not depth or self.left < 0:
            return (kind,)
        if is_a(value, torch.Tensor):
            return Content((kind, str(value.dtype), value.device.type, *_of_tensor(value)))
        if is_array(value):
            data = hashlib.blake2b(repr(value).encode() if value.dtype.hasobject else value.tobytes()).hexdigest()
            return Content((kind, str(value.dtype), "cpu", tuple(value.shape), data))
        if is_a(value, (bytes, bytearray)):
            return kind, bytes(value).hex()
        if is_a(value, type):
            return kind, f"{value.__module__}.{value.__qualname__}"
        if is_a(value, MethodType):
            return kind, *self.many((value.__func__, value.__self__), depth)
        if is_a(value, FunctionType):
            inside = (*(value.__defaults__ or ()), *(contents(cell) for cell in value.__closure__ or ()))
            return kind, value.__qualname__, hash(value.__code__), *self.many(inside, depth)
        if is_a(value, nn.Module):
            return kind, id(value)
        if is_a(value, (set, frozenset)):
            inner = (set if is_a(value, set) else frozenset).__iter__(value)
            return kind, len(value), *sorted(self.many([*inner], depth), key=repr)
        if is_a(value, dict):
            return kind, len(value), *self.many([*dict.items(value)], depth + 1)
        if is_a(value, _ORDERED):
            return kind, len(value), *self.many([thing for step, thing in held(value) if type(step) is int], depth)
        return kind, *self.many([(str(step), thing) for step, thing in held(value)], depth + 1)

    def many(self, values: Any, depth: int) -> list[Any]:
        return [self.told(value, depth - 1) for value in values]


class Content(tuple[Any, ...]):
    """What is told of a tensor or an array: its class, dtype, device and sizes, and what tells its numbers."""

    __slots__ = ()


def _of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    if t.is_meta or t.layout is not torch.strided or t.is_nested or t.is_quantized or type(t) not in _PLAIN_TENSORS:
        return str(t.layout), ""
    with torch.no_grad():
        data = as_bytes(t)
    return tuple(t.shape), hashlib.blake2b(data.numpy()).hexdigest()


_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_OF_BATCHES = (int, float, Content)  # what may follow the batch
_OF_CACHES = (int, float, torch.dtype, torch.device)  # what a cache may hold something for each of


def without_content(told: Any) -> Any:
    """The same, without what tells the numbers of tensors and arrays: these follow the model's own, or what came in."""
    if type(told) is Content:
        return Content(told[:1])
    if type(told) is dict:
        return {key: without_content(inner) for key, inner in told.items()}
    return tuple(map(without_content, told)) if type(told) is tuple else told


def agree(one: Any, other: Any, same_batch: bool) -> bool:
    """Whether what is told of two things is the same, as far as that can be said: at another batch numbers may be others, and
    of tensors of other sizes nothing is said."""
    if not same_batch:
        return bool(_without(one, _OF_BATCHES) == _without(other, _OF_BATCHES))
    if type(one) is not type(other):
        return False
    if type(one) is Content:
        either = len(one) == 1 or len(other) == 1
        return bool(one[0] == other[0] if either else one[3] != other[3] or one == other)
    if type(one) is tuple:
        return len(one) == len(other) and all(agree(a, b, True) for a, b in zip(one, other, strict=True))
    return tree.identical(one, other)


def entries_agree(one: dict[Any, Any], other: dict[Any, Any], same_batch: bool, of_both: bool) -> bool:
    """The same of what two first calls put into one container, by key; or only `of_both`, at the keys that both have.

    Keys that differ in numbers, dtypes or devices alone are those of a cache, which holds something for each.
    """
    if not all(agree(one[key], other[key], same_batch) for key in one.keys() & other.keys()):
        return False
    mine, yours = (
        {_without(key, _OF_CACHES) for key in a if key not in b and (same_batch or key == _without(key, _OF_BATCHES))}
        for a, b in ((one, other), (other, one))
    )
    return of_both or mine == yours


def _without(told: Any, masked: tuple[type, ...]) -> Any:
    """The same, without values of these types, and without how many things of a kind there are."""
    if type(told) in masked:
        return _MASKED
    if type(told) is str and int in masked:
        return _DIGITS.sub(_MASKED, told)
    return tuple(dict.fromkeys(_without(one, masked) for one in told)) if type(told) is tuple else told
