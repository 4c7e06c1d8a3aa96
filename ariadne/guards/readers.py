"""Readers: classes whose own `__getattribute__` is called for each read, by which what forward read of an object is known by name.

Of other objects only the names in forward's code are known, whatever they were asked of. A configuration of transformers has a
hundred attributes, most of which are named somewhere, and are written by who saves a model.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from ariadne.guards.attributes import is_a
from ariadne.guards.steps import WHOLESALE, Step, marked, of_super, plain_steps

READS = "__getattribute__"
TOLD = "<told>"  # among names: what objects of classes that tell were asked for is among them, too
_TELLING = frozenset(
    {"__class__"}
)  # what `isinstance` asks for; other names of this kind may give all that an object holds


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a `__getattribute__` reads: the `names` in its code, and those that `variables` hold when it begins or returns."""

    names: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()


def _asked_at(steps: Sequence[Step], i: int) -> _Asked | None:
    """What `super().__getattribute__(...)` is asked for at a step; None where it may be anything.

    A variable may hold something else by the time the function returns, unless that is what comes next.
    """
    nothing: Step = ("", None)
    (kind, name), *rest = [*steps[i + 1 : i + 7], nothing]
    if [k for k, _ in rest[:2]] == ["CALL", "RETURN_VALUE"] and kind == "LOAD VARIABLE":
        return _Asked(variables=frozenset({name}))
    if kind != "CONSTANT" or rest[0][0] != "CALL":
        return None
    if name == "__dict__":  # `super().__getattribute__("__dict__").get("name")`
        name = rest[2][1] if rest[1] == ("ATTRIBUTE", "get") and rest[2][0] == "CONSTANT" else None
    return _Asked(names=frozenset({name})) if isinstance(name, str) else None


@lru_cache(maxsize=1024)
def _asked(code: CodeType) -> _Asked | None:
    """What a `__getattribute__` is asked for, and what it reads in its place; None where it may read more than that."""
    open_ended = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if code.co_name != READS or code.co_argcount != 2 or open_ended or not WHOLESALE.isdisjoint(code.co_names):
        return None
    found = [_Asked(variables=frozenset({code.co_varnames[1]}))]
    steps = [*plain_steps(marked(dis.get_instructions(code)))]
    for i, (_, name) in enumerate(steps):
        if name == READS:
            asked = _asked_at(steps, i) if of_super(steps, i, code) else None
            if asked is None:
                return None
            found.append(asked)
    nothing = frozenset[str]()
    return _Asked(nothing.union(*(a.names for a in found)), nothing.union(*(a.variables for a in found)))


def tells(cls: type) -> bool:
    """Whether each read of an attribute of this class's objects calls functions that show what is read."""
    own = [c.__dict__[READS] for c in cls.__mro__[:-1] if READS in c.__dict__]
    return bool(own) and all(type(f) is FunctionType and _asked(f.__code__) is not None for f in own)


def answers_itself(value: Any) -> bool:
    """Whether an object's class has a `__getattribute__` of its own, which may give what stands under another name."""
    return type(type(value).__getattribute__) is FunctionType


class Reads:
    """What was read of objects whose class `tells`: names, by the objects' ids."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, set[str]]] = {}  # with the objects, so that their ids stay theirs

    def note(self, frame: FrameType) -> None:
        """Take note of what a `__getattribute__` that begins or returns was asked for."""
        code = frame.f_code
        asked = _asked(code)
        thing = frame.f_locals.get(code.co_varnames[0]) if asked is not None else None
        if asked is None or is_a(thing, nn.Module):
            return
        names = self._of.setdefault(id(thing), (thing, set()))[1]
        names.update(n for n in map(frame.f_locals.get, asked.variables) if isinstance(n, str))
        names.update(asked.names)

    def of(self, thing: Any) -> Collection[str] | None:
        """What was read of an object; None where it may be more than is known."""
        if not tells(type(thing)):
            return None
        _, names = self._of.get(id(thing), (thing, set[str]()))
        return names if all(n in _TELLING or not _is_special(n) for n in names) else None

    @property
    def names(self) -> frozenset[str]:
        """All names that were read of any of them."""
        return frozenset[str]().union(*(names for _, names in self._of.values()))

    def join(self, others: Iterable[Reads]) -> Reads:
        """What these have seen, too."""
        for other in others:
            for at, (thing, names) in other._of.items():
                self._of.setdefault(at, (thing, set()))[1].update(names)
        return self


def _is_special(name: str) -> bool:
    return name[:2] == name[-2:] == "__"
