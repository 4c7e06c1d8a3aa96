"""Unseen: modes of ours that forward's Python does not hear of when it asks whether anything overrides torch's functions.

Under any `TorchFunctionMode` the answer is yes, and `nn.MultiheadAttention` and the modules of a transformer leave their fast path.
Torch itself is told the truth where it asks so as to hand the call to the mode.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ariadne.forks import renewed, rlock
from ariadne.guards import VERSION
from ariadne.stopped.absent import Ghost

_lock = rlock()
_within: Counter[int] = Counter()  # by thread: how many such modes are on in it, or blocks of `unseen`
_put: list[tuple[dict[str, Any], str]] = []  # where questions stand in place of torch's own
_looked: tuple[list[int], list[tuple[dict[str, Any], str]]] = (
    [],
    [],
)  # how all stood; the tables that hold some, and names
_APART = frozenset({"torch", "ariadne"})


class Unseen(TorchFunctionMode):
    """A mode that is put on by `enter`, and of which forward does not hear."""


class _Question:
    """Stands for a function of torch's that tells whether anything overrides one; equal to it, for tables that know it."""

    def __init__(self, plain: Any) -> None:
        self.plain, self.__name__ = plain, plain.__name__
        self.__doc__ = plain.__doc__

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.plain

    def __hash__(self) -> int:
        return hash(self.plain)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo knows torch's own alone
            return self.plain(*args)
        name = str(sys._getframe(1).f_globals.get("__name__"))
        if name.partition(".")[0] == "torch" and not name.startswith("torch.nn.modules."):
            return self.plain(*args)
        if self.plain is _OF_MANY and len(args) == 1:
            args = (tuple(map(_seen, args[0])),)
        else:
            args = tuple(map(_seen, args))
        stack = _get_current_function_mode_stack()
        if not any(isinstance(mode, Unseen) for mode in stack):
            return self.plain(*args)
        for _ in stack:
            _pop_mode()
        try:
            for mode in stack:
                if not isinstance(mode, Unseen):
                    _push_mode(mode)
            return self.plain(*args)
        finally:
            while torch._C._len_torch_function_stack():
                _pop_mode()
            for mode in stack:
                _push_mode(mode)


def _seen(given: Any) -> Any:
    """What a question is asked of; a tensor without data stands for a plain one."""
    return None if type(given) is Ghost else given


_OF_MANY: Any = torch._C._has_torch_function
_ASKED = (_OF_MANY, torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic)
_QUESTIONS = {id(plain): _Question(plain) for plain in _ASKED}
_PLAIN = {id(question): question.plain for question in _QUESTIONS.values()}
_ALL = *_ASKED, *_QUESTIONS.values()
_IDS = _QUESTIONS.keys() | _PLAIN.keys()
_plain_id = id  # while forward is recorded another function has this name


def enter(mode: Unseen) -> None:
    """Put a mode on in this thread."""
    _begin()
    _push_mode(mode)


def leave(mode: Unseen) -> None:
    """Take a mode out from among those that forward has entered."""
    above = []
    while torch._C._len_torch_function_stack():
        one = _pop_mode()
        if one is mode:
            _end()
            break
        above.append(one)
    for other in reversed(above):
        _push_mode(other)


def leave_all() -> None:
    """Take all modes off in this thread."""
    while torch._C._len_torch_function_stack():
        if isinstance(_pop_mode(), Unseen):
            _end()


def beneath(mode: Unseen) -> None:
    """Put a mode below those that forward has entered, so that each is left in its turn."""
    above = []
    while torch._C._len_torch_function_stack():
        above.append(_pop_mode())
    enter(mode)
    for other in reversed(above):
        _push_mode(other)


@contextmanager
def unseen(mode: Unseen | None = None) -> Iterator[None]:
    """While in the block, forward hears neither of such a mode nor of tensors without data."""
    _begin()
    try:
        if mode is not None:
            enter(mode)
        try:
            yield
        finally:
            if mode is not None:
                leave(mode)
    finally:
        _end()


def _begin() -> None:
    with _lock:
        first = not _within.total()
        _within[threading.get_ident()] += 1
        if first:
            _replace()


def _end() -> None:
    with _lock:
        me = threading.get_ident()
        _within[me] -= 1
        if not _within[me]:
            del _within[me]
        if not _within:
            _restore()


def _replace() -> None:
    """Have questions stand wherever a module outside of torch's holds the functions, and where torch's modules look them up."""
    for table, name in _places():
        found = table.get(name)
        if id(found) in _QUESTIONS or id(found) in _PLAIN:  # one that it has found while they stood elsewhere
            table[name] = _QUESTIONS.get(id(found), found)
            _put.append((table, name))


def _places() -> list[tuple[dict[str, Any], str]]:
    """The tables that hold them, and under which names: looked for anew where a module came, or one more is held anywhere."""
    global _looked
    held, now = _looked[1], [VERSION(sys.modules)] if VERSION is not None else [*map(id, sys.modules.values())]
    now += map(sys.getrefcount, _ALL)
    if now != _looked[0]:
        _looked = [], []  # whose tables are among those that hold some
        tables = [m.__dict__ for m in [*sys.modules.values()] if isinstance(m, ModuleType) and not _is_apart(m)]
        # Most hold none: that is asked within C, of which the profile of a capture, under which this runs, hears nothing.
        some = [t for t in tables if not _IDS.isdisjoint(map(_plain_id, t.values()))]
        held = [(t, n) for t in some for n, value in [*t.items()] if id(value) in _QUESTIONS or id(value) in _PLAIN]
        _looked = now, held
    return held


def _is_apart(module: ModuleType) -> bool:
    """Whether a module asks nothing itself, or finds the questions where it looks them up."""
    inside = str(module.__dict__.get("__name__")).partition(".")[0] in _APART
    return inside and module is not torch.overrides and module is not torch._C


def _restore() -> None:
    for table, name in _put:
        plain = _PLAIN.get(id(table.get(name)))
        if plain is not None:
            table[name] = plain
    _put.clear()


def _in_child() -> None:
    """Of the threads that had such modes, a child has but this one."""
    for thread in [*_within]:
        if thread != threading.get_ident():
            del _within[thread]
    if not _within:
        _restore()


renewed(_in_child)
