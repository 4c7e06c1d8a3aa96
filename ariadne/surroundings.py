"""Surroundings: what forward's own functions read outside of the model's attributes, and the names by which they read.

A plan holds the numbers that such reads gave, so a guard has to know of them. They are found in the code of each function that
ran, as chains of attributes and constant keys (`getattr` and `hasattr` with a constant name, too) that start at a global, or at
the function's first argument where that belongs to the model. Not seen: a value that is reached through a closure, an import
inside of a function, a variable that is assigned twice, or `.get`; a global array, enum member or function that is another now; a
container that is iterated.
"""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.held import MISSING, Slots, lasts

ANY = "*"  # among names: attributes may have been read by others, too

_SILENT = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL")
_WHOLESALE = {"__dict__", "vars", "asdict", "astuple", "attrgetter"}
_PACKAGES = {"torch", "ariadne", "sympy", "numpy", "builtins"}
_PYTHON = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_INSTALLED = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib"))


Step = tuple[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """Something in the surroundings: `table[key]`, called `name`, was `value`, a plain value or what one was taken out of.

    `MISSING` stands for an attribute that was looked for in vain.
    """

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


@dataclass(frozen=True, slots=True)
class Chain:
    """A read in a function's code: from a global of this name, or from the first argument, by these links.

    A link is (kind, key): an attribute by its name, an item by its key, or an attribute that is asked for by `getattr`.
    """

    start: str | None
    links: tuple[tuple[str, Any], ...] = ()


@dataclass
class Surroundings:
    """What the functions that ran have read, as it was when each ran first.

    `belongs` tells the objects that the model holds. `names`: all names in the code of these functions; an attribute of an object
    that goes by none of them, nor by one that `getattr` was asked for, was not read, unless `ANY` is among them.
    """

    belongs: Callable[[Any], bool]
    chains: dict[int, tuple[CodeType, list[Chain]]] = field(default_factory=dict)
    quiet: set[int] = field(default_factory=set)  # codes without any
    seen: set[tuple[int, int, int]] = field(default_factory=set)  # two modules may hold equal code
    kept: list[Any] = field(default_factory=list)  # so that no id is given out again
    found: dict[tuple[int, bool, Any], Outside] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    others: dict[int, bool] = field(default_factory=dict)

    def note(self, frame: FrameType) -> None:
        """Look at the code of a call; of torch's or Python's own, only at the names in it."""
        code, table = frame.f_code, frame.f_globals
        if id(table) not in self.others:
            self.others[id(table)] = _is_known(table)
            self.kept.append(table)
        if id(code) not in self.chains:
            self.names.update(code.co_names, _keywords(code.co_consts))
            others = self.others[id(table)]
            steps = [] if others else list(plain_steps(dis.get_instructions(code)))
            self.chains[id(code)] = code, list(chains(code.co_varnames[0] if code.co_argcount else None, steps))
            if not others and not _WHOLESALE.isdisjoint(code.co_names):
                self.names.add(ANY)
        reads = self.chains[id(code)][1]
        if not reads:  # as in all of torch's code, which is most of what runs
            self.quiet.add(id(code))
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if first is not None and not self.belongs(first):
            first = None
        at = id(code), id(table), id(first)
        if at not in self.seen:
            self.seen.add(at)
            for chain in reads:
                for outside in _read(chain, table, first):
                    self.found.setdefault(outside.place, outside)

    def lasting(self) -> list[Outside]:
        """What was read and is still as it was: what forward itself changes tells nothing about the next call."""
        return [outside for outside in self.found.values() if outside.now() is outside.value]


@contextmanager
def surroundings(mine: Callable[[], bool], belongs: Callable[[Any], bool]) -> Iterator[Surroundings]:
    """Look at every Python function that starts in the block, in this thread, while what runs is `mine`.

    A profiler that is at work meanwhile sees nothing of the block.
    """
    found, before = Surroundings(belongs), sys.getprofile()
    quiet = found.quiet

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and id(frame.f_code) not in quiet and mine():
            found.note(frame)

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _is_known(table: dict[str, Any]) -> bool:
    """Whether a module's globals are those of torch or of Python itself, by name and, where names are common, by place."""
    top = str(table.get("__name__")).partition(".")[0]
    if top in _PACKAGES:
        return True
    file = str(table.get("__file__") or "")
    return top in sys.stdlib_module_names and (
        not file or (file.startswith(_PYTHON) and not file.startswith(_INSTALLED))
    )


def _keywords(constants: Any) -> Iterator[str]:
    """The texts in tuples among constants: attributes by which `match` takes an object apart stand there."""
    for constant in constants:
        if isinstance(constant, tuple):
            yield from (text for text in constant if isinstance(text, str))


def plain_steps(steps: Iterable[dis.Instruction]) -> Iterator[Step]:
    """The steps as (kind, argument), the same for every Python: later ones load or store two variables in one step."""
    for step in steps:
        kinds = re.findall(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF)", step.opname)
        if kinds:
            arguments = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            yield from zip((f"{kind} VARIABLE" for kind in kinds), arguments, strict=False)
        elif step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]"):
            yield "SUBSCRIPT", None
        elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            yield "CONSTANT", step.argval
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield "ATTRIBUTE", step.argval
        elif step.opname not in _SILENT:
            yield step.opname, step.argval


def chains(first: str | None, steps: Sequence[Step]) -> Iterator[Chain]:
    """The reads in a function's code, each from where it starts to where something else happens to the value."""
    counted = {name for kind, name in steps if kind == "STORE_GLOBAL"}  # its own, such as a counter or "was told once"
    stored = Counter(name for kind, name in steps if kind in ("STORE VARIABLE", "DELETE VARIABLE"))
    variables = {first: Chain(None)} if first and not stored[first] else {}
    for i, (kind, name) in enumerate(steps):
        if kind == "LOAD_GLOBAL" and name not in counted:
            start = Chain(name)
        elif kind == "LOAD VARIABLE" and name in variables:
            start = variables[name]
        else:
            continue
        asks = i > 0 and steps[i - 1] in (("LOAD_GLOBAL", "getattr"), ("LOAD_GLOBAL", "hasattr"))
        links, at = _links(steps, i + 1, asks)
        chain = Chain(start.start, start.links + links)
        if at < len(steps) and steps[at][0] == "STORE VARIABLE" and stored[steps[at][1]] == 1:
            variables[steps[at][1]] = chain
        if chain.start is not None or chain.links:
            yield chain


def _links(steps: Sequence[Step], at: int, asks: bool) -> tuple[tuple[tuple[str, Any], ...], int]:
    """The links that start at a step, and where they end."""
    found: list[tuple[str, Any]] = []
    while at < len(steps):
        kind, key = steps[at]
        if kind == "ATTRIBUTE":
            found.append(("attribute", key))
        elif kind == "CONSTANT" and asks and isinstance(key, str):
            return (*found, ("asked", key)), at + 1
        elif kind == "CONSTANT" and steps[at + 1 : at + 2] == [("SUBSCRIPT", None)]:
            found.append(("item", key))
            at += 1
        else:
            break
        at += 1
    return tuple(found), at


def _read(chain: Chain, table: dict[str, Any], first: Any) -> Iterator[Outside]:
    """What a chain passes on its way to a plain value, as far as no other guard looks at it."""
    if chain.start is not None:
        if chain.start not in table:
            return
        value, links = table[chain.start], chain.links
        name = f"the global {table.get('__name__')}.{chain.start}"
        way = [Outside(table, chain.start, value, name)]
    elif first is not None:
        value, links, name, way = first, chain.links, type(first).__name__, []
    else:
        return
    for kind, key in links:
        if lasts(value):
            break
        link = _link(value, kind, key, name)
        if link is None:
            break
        # What an object of the model has itself, or a module from its class, is held already as the attribute that was read.
        if chain.start is not None or not (_has_itself(value, key) or isinstance(value, nn.Module)):
            way.append(link)
        value, name = link.value, link.name
        if kind == "asked":
            break
    if lasts(value) or value is MISSING:
        yield from way


def _link(value: Any, kind: str, key: Any, name: str) -> Outside | None:
    """What one link of a chain leads to; None where that can't be told without running the model's code."""
    if kind == "item":
        # To ask a defaultdict would put something there.
        if not isinstance(value, (dict, list, tuple)) or (isinstance(value, dict) and key not in value):
            return None
        found = Outside(value, key, MISSING, "").now()
        return None if found is MISSING else Outside(value, key, found, f"{name}[{key!r}]")
    if _is_torchs(value):
        return None
    there = inspect.getattr_static(value, key, MISSING)
    if there is MISSING and isinstance(value, dict) and key in value and getattr(value, key, MISSING) is value[key]:
        return Outside(value, key, value[key], f"{name}.{key}")  # a dict whose keys can be read as attributes
    if isinstance(there, MemberDescriptorType):
        there = getattr(value, key, MISSING)
    table = vars(value) if isinstance(value, ModuleType) else Slots(value)
    if there is MISSING:
        finds_more = hasattr(value, "__getattr__")
        return (
            Outside(vars(value), key, MISSING, f"{name}.{key}")
            if kind == "asked" and not finds_more and hasattr(value, "__dict__")
            else None
        )
    return None if hasattr(type(there), "__get__") else Outside(table, key, there, f"{name}.{key}")


def _has_itself(value: Any, key: Any) -> bool:
    """Whether an object has an attribute, or a container an item, of its own and not from its class."""
    if isinstance(value, (dict, list, tuple)) or key in getattr(value, "__dict__", ()):
        return True
    return isinstance(inspect.getattr_static(value, key, None), MemberDescriptorType)


def _is_torchs(value: Any) -> bool:
    """Whether a global is a module or class of torch, or of Python itself."""
    if isinstance(value, torch.Tensor):
        return True
    if not isinstance(value, (ModuleType, type)):
        return False
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    top = str(home).partition(".")[0]
    return top in _PACKAGES or top in sys.stdlib_module_names
