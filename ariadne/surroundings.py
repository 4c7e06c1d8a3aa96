"""Surroundings: what forward's own functions read outside of the model, in the globals of their modules.

A plan holds the numbers that such reads gave, so a guard has to know of them. They are found in the code of each function that
ran: a global that is a plain value, and one that attributes and constant keys lead to from a global module, class, object or
container. Not seen: a value that is reached through a closure, an import inside of a function, a variable, `getattr` or `.get`; a
global array, enum member or function that is another now; a container that is iterated.
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

    @property
    def place(self) -> tuple[int, bool, Any]:
        """The same for two that stand in one place: an attribute and an item of one object are two."""
        slots = isinstance(self.table, Slots)
        return id(self.table.thing if slots else self.table), slots, self.key

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
    found: dict[tuple[int, bool, Any], Outside] = field(default_factory=dict)

    def note(self, frame: FrameType) -> None:
        """Look at the code of a call, if it is not torch's or Python's own."""
        code, at = frame.f_code, (id(frame.f_code), id(frame.f_globals))
        if at in self.seen:
            return
        self.seen[at] = code, frame.f_globals
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _OTHERS:
            for outside in _read_by(code, frame.f_globals):
                self.found.setdefault(outside.place, outside)

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
        after = (steps[k] for k in range(i + 1, len(steps)))
        rest = (s for s in after if s.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL"))
        way = [Outside(table, name, value, f"{home}.{name}")]
        while not way[-1].is_plain and (further := _next(way[-1], rest)) is not None:
            way.append(further)
        if way[-1].is_plain:
            yield from way


def _next(way: Outside, steps: Iterator[dis.Instruction]) -> Outside | None:
    """What the next steps take out of a thing: an attribute, or what stands at a constant key."""
    value, first = way.value, next(steps, None)
    if first is None:
        return None
    key = first.argval
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD") and not _is_torchs(value):
        there = inspect.getattr_static(value, key, MISSING)
        if there is MISSING and isinstance(value, dict) and key in value and getattr(value, key, MISSING) is value[key]:
            return Outside(value, key, value[key], f"{way.name}.{key}")  # a dict whose keys can be read as attributes
        if isinstance(there, MemberDescriptorType):
            there = getattr(value, key, MISSING)
        if there is not MISSING and not hasattr(type(there), "__get__"):
            return Outside(
                vars(value) if isinstance(value, ModuleType) else Slots(value), key, there, f"{way.name}.{key}"
            )
    elif first.opname in _CONSTANT and isinstance(value, (dict, list, tuple)):
        second = next(steps, None)
        found = Outside(value, key, MISSING, f"{way.name}[{key!r}]")
        absent = isinstance(value, dict) and key not in value  # to ask a defaultdict would put something there
        if second is not None and second.opname == _SUBSCRIPT and not absent and found.now() is not MISSING:
            return replace(found, value=found.now())
    return None


def _is_torchs(value: Any) -> bool:
    """Whether a global is a module or class of torch, or of Python itself."""
    if not isinstance(value, (ModuleType, type)):
        return False
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(home).partition(".")[0] in _OTHERS
