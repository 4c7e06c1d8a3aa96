"""Identity: `x.shape[0] is 2`. No number can tell that it was compared so, and no batch that did not run shows the answer.

Which functions compare things by `is` stands in their code. What they compared is seen as they run once more, as far as it can be
read from variables, attributes and items without running any code; a size is found on neither side, or it may have been.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from ariadne.guards import MISSING, is_a, own_of

_SILENT = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "RESUME", "NOP", "COPY_FREE_VARS")
_VARIABLES = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF")
_TELLS_NO_NUMBER = frozenset({"type", "__class__", "dtype", "device", "layout", "__name__", "__func__", "__self__"})
_SOMETHING = object()  # that can't be told
_NOTHING = object()  # that is no number, whatever it is


@dataclass(frozen=True, slots=True)
class Comparison:
    """An `is` in a function's code: at which byte, and the steps that make its sides."""

    offset: int
    sides: tuple[tuple[dis.Instruction, ...], tuple[dis.Instruction, ...]]

    def may_be_of_numbers(self, frame: FrameType) -> bool:
        """Whether both sides may be whole numbers, as the variables of a frame are now."""
        return all(_may_be_number(_value(side, frame)) for side in self.sides)


@lru_cache(maxsize=4096)
def comparisons(code: CodeType) -> tuple[Comparison, ...]:
    """The comparisons by `is` in a function that may be of two whole numbers."""
    if not any(step.opname == "IS_OP" for step in dis.get_instructions(code)):
        return ()
    steps = [one for step in dis.get_instructions(code) if step.opname not in _SILENT for one in _apart(step)]
    found = []
    for i, step in enumerate(steps):
        if step.opname != "IS_OP":
            continue
        right, at = _side(steps, i)
        left, _ = _side(steps, at)
        if right is not None and any(one.is_jump_target for one in (*right[1:], step)):
            right = None
        if left is None or right is None or any(one.is_jump_target for one in (*left[1:], right[0])):
            left = None
        sides = (left or (), right or ())
        constants = [side[0].argval for side in sides if len(side) == 1 and side[0].opname == "LOAD_CONST"]
        if all(type(value) is int for value in constants):
            found.append(Comparison(step.offset, sides))
    return tuple(found)


@lru_cache(maxsize=4096)
def compares(code: CodeType) -> bool:
    """Whether a function compares things by `is`, other than with None, True, False and other constants."""
    steps = [*dis.get_instructions(code)]
    return any(b.opname == "IS_OP" and a.opname != "LOAD_CONST" for a, b in pairwise(steps))


def _apart(step: dis.Instruction) -> Iterator[dis.Instruction]:
    """Python 3.13 loads or stores two variables in one step: each as a step of its own."""
    names = step.opname.replace("_LOAD", " LOAD").replace("_STORE", " STORE").split()
    if len(names) < 2 or not isinstance(step.argval, tuple):
        yield step
        return
    for name, variable in zip(names, step.argval, strict=True):
        yield step._replace(opname=name, opcode=dis.opmap[name], arg=0, argval=variable)


def _side(steps: Sequence[dis.Instruction], end: int) -> tuple[tuple[dis.Instruction, ...] | None, int]:
    """The steps that make what is on top of the stack before the step `end`, and where they begin."""
    made = 0
    for at in range(end - 1, -1, -1):
        step = steps[at]
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return None, 0
        made += dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None)
        if made == 1:
            return tuple(steps[at:end]), at
    return None, 0


def _value(side: Sequence[dis.Instruction], frame: FrameType) -> Any:
    """What a side is, read without running code; `_SOMETHING` where that can't be told."""
    stack: list[Any] = []
    for step in side:
        if step.opname == "LOAD_CONST":
            stack.append(step.argval)
        elif step.opname in _VARIABLES:
            names = (frame.f_locals, frame.f_globals, vars(sys.modules["builtins"]))
            stack.append(next((table[step.argval] for table in names if step.argval in table), _SOMETHING))
        elif step.opname == "LOAD_ATTR" and stack:
            stack[-1] = _attribute(stack[-1], step.argval)
        elif step.opname == "BINARY_SUBSCR" and len(stack) > 1:
            key = stack.pop()
            stack[-1] = _item(stack[-1], key)
        else:
            is_type = side[0].opname in _VARIABLES and side[0].argval == "type" and side[-1].opname.startswith("CALL")
            return _NOTHING if is_type else _SOMETHING
    return stack[-1] if len(stack) == 1 else _SOMETHING


def _attribute(value: Any, name: str) -> Any:
    if name in _TELLS_NO_NUMBER:
        return _NOTHING
    if value is _SOMETHING or value is _NOTHING:
        return _SOMETHING
    if is_a(value, torch.Tensor):
        return getattr(value, name, _SOMETHING) if name in ("shape", "ndim", "grad_fn", "grad", "data") else _SOMETHING
    if is_a(value, ModuleType):
        return vars(value).get(name, _SOMETHING)
    if is_a(value, torch.nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            if name in value.__dict__.get(table, ()):
                return value.__dict__[table][name]
    own = own_of(value)
    if own is not None and name in own:
        return own[name]
    found = inspect.getattr_static(value, name, MISSING)
    return _SOMETHING if found is MISSING or hasattr(type(found), "__get__") else found


def _item(value: Any, key: Any) -> Any:
    try:
        known = type(value) in (list, tuple, dict, torch.Size) and type(key) in (int, str, bool)
        return value[key] if known else _SOMETHING
    except LookupError:
        return _SOMETHING


def _may_be_number(value: Any) -> bool:
    return value is _SOMETHING or type(value) is int


@dataclass
class Watching:
    """The comparisons of whole numbers that were seen, in words."""

    known: dict[CodeType, dict[int, Comparison]]
    seen: list[str] = field(default_factory=list)

    def step(self, frame: FrameType, offset: int) -> None:
        """Look at what is compared, if anything is, as the step at this byte of a function begins."""
        here = self.known[frame.f_code]
        if offset in here and here[offset].may_be_of_numbers(frame):
            self.seen.append(frame.f_code.co_name)
            del here[offset]

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What `sys.settrace` calls as functions start, and as each of their steps begins."""
        if frame.f_code not in self.known:
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.step(frame, frame.f_lasti)
        return self.trace


@contextmanager
def watching(codes: Iterable[CodeType]) -> Iterator[list[str]]:
    """Look at what these functions compare by `is` as they run in the block, in this thread; gives the names of those that may
    compare whole numbers.
    """
    found = Watching({code: {c.offset: c for c in comparisons(code)} for code in codes})
    found.known = {code: here for code, here in found.known.items() if here}
    if not found.known:
        yield found.seen
        return
    with _monitored(found) if sys.version_info >= (3, 12) else _traced(found):
        yield found.seen


@contextmanager
def _traced(found: Watching) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(found.trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _monitored(found: Watching) -> Iterator[None]:
    """From Python 3.12 on `sys.settrace` leaves out the steps of a function's first call, and of later ones too in 3.12."""
    tools: Any = vars(sys)["monitoring"]
    tool, this, event = _tool(tools), threading.get_ident(), tools.events.INSTRUCTION
    if tool is None:
        found.seen += [code.co_name for code in found.known]
        yield
        return

    def step(code: CodeType, offset: int) -> None:
        if threading.get_ident() == this:
            found.step(sys._getframe(1), offset)

    tools.register_callback(tool, event, step)
    try:
        for code in found.known:
            tools.set_local_events(tool, code, event)
        yield
    finally:
        for code in found.known:
            tools.set_local_events(tool, code, 0)
        tools.register_callback(tool, event, None)
        tools.free_tool_id(tool)


def _tool(tools: Any) -> int | None:
    """A number under which nobody watches yet; None if there is none, so that all comparisons count as seen."""
    for number in range(5, -1, -1):
        try:
            tools.use_tool_id(number, "ariadne")
        except ValueError:
            continue
        return number
    return None
