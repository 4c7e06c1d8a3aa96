"""Surroundings: what forward's own functions read outside of the model, in the globals of their modules.

A plan holds the numbers that such reads gave, so a guard has to know of them. They are found in the code of each function that
ran: a global that is a plain value; and one attribute or one constant key of a global that is a module, a class, an object or a
container. Not seen: a value that is reached in more steps, through a closure, an import inside of a function, `getattr` or `.get`;
a global array, enum member or function that is another now; a container that is iterated.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, MemberDescriptorType, ModuleType
from typing import Any

from ariadne.held import MISSING, Slots, lasts

_SUBSCRIPT = "BINARY_SUBSCR" if "BINARY_SUBSCR" in dis.opmap else "BINARY_OP"  # from Python 3.14 on
_CONSTANT = ("LOAD_CONST", "LOAD_SMALL_INT")
_OTHERS = sys.stdlib_module_names | {"torch", "ariadne", "sympy", "numpy", "builtins"}


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """Something in the surroundings: `table[key]`, called `name`, was `value`, a plain value or what one was taken out of."""

    table: Any
    key: Any
    value: Any
    name: str

    @property
    def is_plain(self) -> bool:
        """Whether an equal value would do as well."""
        return lasts(self.value)

    def now(self) -> Any:
        """What stands there now; `MISSING` where nothing does."""
        try:
            return self.table[self.key]
        except (LookupError, TypeError):
            return MISSING


@dataclass
class Surroundings:
    """What the functions that ran have read, as it was when each ran first."""

    seen: dict[tuple[int, int], tuple[CodeType, Any]] = field(default_factory=dict)  # two modules may hold equal code
    found: dict[tuple[int, Any], Outside] = field(default_factory=dict)

    def note(self, frame: FrameType) -> None:
        """Look at the code of a call, if it is not torch's or Python's own."""
        code, at = frame.f_code, (id(frame.f_code), id(frame.f_globals))
        if at in self.seen:
            return
        self.seen[at] = code, frame.f_globals
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _OTHERS:
            for outside in _read_by(code, frame.f_globals):
                self.found.setdefault((id(outside.table), outside.key), outside)

    def lasting(self) -> list[Outside]:
        """What was read and is still as it was: what forward itself changes tells nothing about the next call."""
        return [outside for outside in self.found.values() if outside.now() is outside.value]


@contextmanager
def surroundings(mine: Callable[[], bool]) -> Iterator[Surroundings]:
    """Look at every Python function that starts in the block, in this thread, while what runs is `mine`.

    A profiler that is at work meanwhile sees nothing of the block.
    """
    found, before = Surroundings(), sys.getprofile()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and mine():
            found.note(frame)

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _read_by(code: CodeType, table: Mapping[str, Any]) -> Iterator[Outside]:
    """The plain values that code takes out of a table of globals."""
    if not any(name in table for name in code.co_names):
        return
    home, steps = str(table.get("__name__")), list(dis.get_instructions(code))
    counted = {s.argval for s in steps if s.opname == "STORE_GLOBAL"}  # its own, such as a counter or "was told once"
    for i, step in enumerate(steps):
        if step.opname != "LOAD_GLOBAL" or step.argval not in table or step.argval in counted:
            continue
        name, value = step.argval, table[step.argval]
        if lasts(value):
            yield Outside(table, name, value, f"{home}.{name}")
            continue
        rest = [s for s in steps[i + 1 : i + 5] if s.opname not in ("CACHE", "PUSH_NULL", "PRECALL")][:2]
        for outside in _inside(value, f"{home}.{name}", rest):
            yield Outside(table, name, value, f"{home}.{name}")
            yield outside


def _inside(value: Any, name: str, steps: list[dis.Instruction]) -> Iterator[Outside]:
    """What the next steps take out of a global, where that is a plain value."""
    if not steps:
        return
    first = steps[0]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        there = inspect.getattr_static(value, first.argval, None)
        if isinstance(there, MemberDescriptorType):
            there = getattr(value, first.argval, None)
        if lasts(there) and not _is_torchs(value):
            holder = vars(value) if isinstance(value, ModuleType) else Slots(value)
            yield Outside(holder, first.argval, there, f"{name}.{first.argval}")
    elif (
        isinstance(value, (dict, list, tuple))
        and len(steps) == 2
        and first.opname in _CONSTANT
        and steps[1].opname == _SUBSCRIPT
    ):
        there = Outside(value, first.argval, MISSING, f"{name}[{first.argval!r}]")
        if lasts(there.now()):
            yield replace(there, value=there.now())


def _is_torchs(value: Any) -> bool:
    """Whether a global is a module or class of torch, or of Python itself."""
    if not isinstance(value, (ModuleType, type)):
        return False
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(home).partition(".")[0] in _OTHERS
