"""Counted: what counts of an attribute that forward read, going by the names in the code that ran."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ariadne.guards.attributes import (
    ANY,
    MISSING,
    Attribute,
    bound_to,
    held,
    is_a,
    is_array,
    is_fixed,
    is_followed,
    is_opaque,
    lasts,
    may_get_fields,
    own_of,
    simple,
)
from ariadne.guards.classes import can_become
from ariadne.guards.kept import Bytes, Contents, Keys, Length, OfKind, Own, Same
from ariadne.guards.opened import State, asks_itself, counts_by_which, data_in, keeps_in_c, only_answers
from ariadne.guards.readers import Reads
from ariadne.guards.recording import Recording

FAR = 64  # steps into what an attribute holds; what stands further is not looked at
_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType)
_RENEWED = ("_flat_weights", "_flat_weight_refs")  # of RNNs: see `keeps_its_weights`


def owner_of(module: nn.Module, name: str) -> type | None:
    """The class in which a look-up of `name` on the module ends, if its own dict does not have it; None where there is none."""
    return next((c for c in type(module).__mro__ if name in c.__dict__), None)


class Names:
    """Which attributes of objects forward may have read, by the names in the code that ran."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self.names = set[str]().union(*(recorded.names for recorded in recordings))
        self.any = not self.names or ANY in self.names
        self.assigned = set[str]().union(*(recorded.assigned for recorded in recordings))
        self.whole = {key: thing for recorded in recordings for key, thing in recorded.whole.items()}
        self.moved = set[int | None]().union(*(recorded.moved for recorded in recordings))
        self.stands: dict[int, set[Any]] = {}
        for recorded in recordings:
            for at, stands in recorded.stands.items():
                self.stands[at] = self.stands.get(at, stands) & stands
        self.codes = set[types.CodeType]().union(*(recorded.codes for recorded in recordings))
        self.by_name = set[str]().union(*(recorded.by_name for recorded in recordings))
        past = any("static" in recorded.looked for recorded in recordings)  # it may have read past `__getattribute__`
        seen = [recorded.reads for recorded in recordings if recorded.reads is not None]
        self._reads = Reads().join(seen) if seen and not past else None

    def read_of(self, value: Any) -> Collection[str] | None:
        """The names of all attributes that were read of an object; None where they are not known."""
        return None if self._reads is None else self._reads.of(value)

    def asked_of(self, value: Any) -> Collection[str] | None:
        """The names under which an object may have been asked for attributes that it doesn't have; None for any."""
        read = self.read_of(value)
        if read is not None:
            return read
        return None if self.any or id(value) in self.whole else self.by_name

    def of(self, value: Any) -> Collection[str] | None:
        """The names in the code that ran, by which a thing may have been read; None for any."""
        return None if self.any or id(value) in self.whole else self.names

    def counts(self, value: Any, step: Any) -> bool:
        """Whether what stands at a step of a value may have been read: not where no code names it and no code of the class's own
        finds attributes under other names.
        """
        if not isinstance(step, Attribute):
            return True
        if bound_to(value) is not MISSING or is_a(value, defaultdict):
            return True
        read = self.read_of(value)
        if read is not None:
            return step in read
        if self.any or step in self.names or id(value) in self.whole:
            return True
        return (
            isinstance(value, partial)
            or asks_itself(value)
            or isinstance(type(value).__getattribute__, types.FunctionType)
        )

    def moves(self, value: Any) -> bool:
        """Whether forward changes a plain container, or one inside of it."""
        if not self.moved or not is_a(value, (dict, list, tuple, set)):
            return False
        inner = dict.values(value) if is_a(value, dict) else value
        return id(value) in self.moved or (simple(value) and any(map(self.moves, inner)))


def kept_of_attribute(module: nn.Module, name: str, value: Any, names: Names) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """What a guard keeps of an attribute that forward read, and of all that it holds.

    Plain values as they are, the contents of arrays, the sizes of containers, tensors that a plan follows, and of anything else
    the identity.
    """
    mine = name in module.__dict__
    if mine and names.moves(module.__dict__[name]):
        yield from _inside((name,), module.__dict__[name], set(), names)
        return
    if simple(value) and not (mine and may_get_fields(value)):
        owner = owner_of(module, name)
        plain = owner is not None and not hasattr(
            type(owner.__dict__[name]), "__get__"
        )  # else a property: what it reads counts
        if mine or plain:
            yield (name,), value
        return
    renewed = name in _RENEWED and isinstance(module, nn.RNNBase)
    if mine and not renewed:
        yield from _inside((name,), value, set(), names)


def _inside(keys: tuple[Any, ...], value: Any, seen: set[int], names: Names) -> Iterable[tuple[tuple[Any, ...], Any]]:
    if id(value) in names.moved:
        return  # a cache: the second run showed that the result does not depend on what is in it
    if (at := id(own_of(value))) in names.moved:  # one in an attribute, which the others may not be
        for step, thing in held(value) if id(value) not in seen else ():
            if step in names.stands.get(at, ()) and names.counts(value, step) and step not in names.assigned:
                seen.add(id(value))
                yield from _inside((*keys, step), thing, seen, names)
        return
    if is_a(value, torch.Tensor):
        yield keys, value if is_followed(keys) else Same(value)
        return
    if simple(value) and not may_get_fields(value) and not names.moves(value):
        yield keys, value if lasts(value) else copy.deepcopy(value)
        return
    yield keys, Same(value)
    if type(value) is types.MethodType and len(keys) < FAR:
        yield from _inside((*keys, Attribute("__self__")), value.__self__, seen, names)
    if id(value) in seen or is_fixed(value) or len(keys) >= FAR:
        return
    if is_opaque(value) or (is_array(value) and value.dtype.hasobject):
        if only_answers(value, names.codes, names.by_name):
            return
        if not counts_by_which(value) and type(value) is not types.MethodType:
            yield keys, State(value, names.of(value), names.assigned, names.moved)
        return
    seen.add(id(value))
    if is_a(value, partial) and is_a(value.func, _IN_C):  # what that reads of its arguments, no code names
        yield keys, State(value, None, names.assigned, names.moved)
    if can_become(value):
        yield keys, OfKind(value)
    if is_array(value):
        yield keys, Bytes(value)
    elif Contents.takes(value):
        yield keys, Contents(value)
        if not own_of(value):  # an `OrderedDict` may have attributes
            return
    elif is_a(value, dict):
        yield keys, Keys(value)
    elif is_a(value, (set, frozenset)):  # no steps lead to what is in it
        yield keys, State(value, names.of(value), names.assigned, names.moved)
    elif is_a(value, (list, deque)):
        yield keys, Length(value)
    if own_of(value) is not None and type(value) is not OrderedDict and (asked := names.asked_of(value)) != set():
        yield keys, Own(value, names.assigned, asked)
    if not is_array(value) and (data := data_in(value)) is not None:
        yield keys, data
    if keeps_in_c(value) and (shown := State(value, names.of(value), names.assigned, names.moved)).is_same():
        yield keys, shown
    for step, thing in held(value):
        if names.counts(value, step):
            yield from _inside((*keys, step), thing, seen, names)
