"""Surroundings: what forward's own functions read outside of the model's attributes, and the names by which they read.

A plan holds the numbers that such reads gave, so a guard has to know of them. They are found in the code of each function that
ran, as chains of attributes and constant keys (`getattr` and `hasattr` with a constant name, too) that start at a global, or at
an argument or a variable of a function around that belongs to the model. Not seen: a value that is reached through an import
inside of a function, a variable that is assigned twice, or `.get`; a global array, enum member or function that is another now; a
container that is iterated.
"""

from __future__ import annotations

import dis
import inspect
import random
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from types import CodeType, FrameType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.held import MISSING, Slots, is_a, is_pythons, lasts, own_of

ANY = "*"  # among names: attributes may have been read by others, too

_SILENT = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL")
_WHOLESALE = frozenset(
    "__dict__ __getstate__ __reduce_ex__ asdict astuple attrgetter format getmembers model_dump repr vars".split()
)
_PUTTING = frozenset({"setdefault", "update"})
_PACKAGES = {"torch", "ariadne", "sympy", "numpy", "builtins"}

Step = tuple[str, Any]
_ASKING: tuple[Step, ...] = (("LOAD_GLOBAL", "getattr"), ("LOAD_GLOBAL", "hasattr"))


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """Something in the surroundings: `table[key]`, called `name`, was `value`, a plain value or what one was taken out of.

    `MISSING` stands for an attribute that was looked for in vain.
    """

    table: Any
    key: Any
    value: Any
    name: str
    owner: Any = None  # the object of the model that it was read from

    @property
    def is_plain(self) -> bool:
        """Whether an equal value would do as well."""
        return lasts(self.value)

    @property
    def place(self) -> tuple[int, bool, Any]:
        """The same for two that stand in one place: an attribute and an item of one object are two."""
        slots = isinstance(self.table, Slots)
        return id(self.table.thing if slots else self.table), slots, self.key

    def of_copy(self, memo: Mapping[int, Any]) -> Outside:
        """The same for a deep copy of the model; what stands outside of it is shared."""
        if id(self.owner) not in memo:
            return self
        owner = memo[id(self.owner)]
        return replace(self, table=Slots(owner) if isinstance(self.table, Slots) else vars(owner), owner=owner)

    def now(self) -> Any:
        """What stands there now; `MISSING` where nothing does."""
        try:
            return self.table[self.key]
        except (LookupError, TypeError):
            return MISSING


@dataclass(frozen=True, slots=True)
class Chain:
    """A read in a function's code: from a global or an argument of this name, by these links.

    A link is (kind, key): an attribute by its name, an item by its key, or an attribute that is asked for by `getattr`.
    """

    start: str
    links: tuple[tuple[str, Any], ...] = ()
    of_argument: bool = False


@dataclass
class Surroundings:
    """What the functions that ran have read, as it was when each ran first.

    `belongs` tells the objects that the model holds. `names`: all names and texts in the code of these functions; an attribute of
    an object that goes by none of them was not read, unless `ANY` is among them, or the object among those read as a `whole`.
    """

    belongs: Callable[[Any], bool]
    found: dict[tuple[int, bool, Any], Outside] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    whole: dict[int, Any] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)  # attributes that the code assigns
    filled: set[str] = field(default_factory=set)  # attributes that it reads where it puts something into a container
    quiet: set[int] = field(default_factory=set)  # codes that read nothing that counts
    drew: bool = False  # this thread drew from Python's own generator
    _reads: dict[int, tuple[CodeType, list[Chain], bool]] = field(default_factory=dict)
    _seen: set[tuple[int, ...]] = field(default_factory=set)  # two modules may hold equal code
    _others: dict[int, tuple[bool, Any]] = field(default_factory=dict)

    def note(self, frame: FrameType) -> None:
        """Look at the code of a call; of torch's or Python's own, only at the names in it."""
        code, table = frame.f_code, frame.f_globals
        if id(table) not in self._others:
            self._others[id(table)] = is_known(table), table
        others = self._others[id(table)][0]
        if id(code) not in self._reads:
            if str(table.get("__name__")).partition(".")[0] not in ("ariadne", "torch"):
                self.names.update(code.co_names, _texts(code.co_consts))
            steps = [] if others else list(plain_steps(dis.get_instructions(code)))
            self.assigned.update(name for kind, name in steps if kind == "STORE_ATTR")
            if any(kind == "STORE_SUBSCR" for kind, _ in steps) or not _PUTTING.isdisjoint(code.co_names):
                self.filled.update(name for kind, name in steps if kind == "ATTRIBUTE")
            wholesale = not _WHOLESALE.isdisjoint(code.co_names) or makes_names(steps)
            self._reads[id(code)] = code, list(chains(_given(code), steps)), wholesale
        _, reads, wholesale = self._reads[id(code)]
        if not reads and not wholesale:  # as in nearly all of torch's code, which is most of what runs
            self.quiet.add(id(code))
            return
        names = _given(code)
        given = frame.f_locals if names else {}
        mine = {name: given[name] for name in names if name in given and self.belongs(given[name])}
        at = (id(code), id(table), *map(id, mine.values()))
        if at in self._seen:
            return
        self._seen.add(at)
        for thing in mine.values() if wholesale else ():
            if is_a(thing, nn.Module):  # or something that it holds
                if not others:
                    self.names.add(ANY)
            else:
                self.whole[id(thing)] = thing
        for chain in reads:
            for outside in _read(chain, table, mine):
                self.found.setdefault(outside.place, outside)

    def lasting(self) -> list[Outside]:
        """What was read and is still as it was: what forward itself changes tells nothing about the next call."""
        return [outside for outside in self.found.values() if outside.now() is outside.value]


@contextmanager
def surroundings(
    mine: Callable[[], bool], belongs: Callable[[Any], bool], aside: Callable[[], AbstractContextManager[None]]
) -> Iterator[Surroundings]:
    """Look at every Python function that starts in the block, in this thread, while what runs is `mine`.

    To look is done `aside`. A profiler that is at work meanwhile sees nothing of the block.
    """
    found, before = Surroundings(belongs), sys.getprofile()
    quiet, shared = found.quiet, random.seed.__self__  # type: ignore[attr-defined]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in quiet and mine():
                with aside():
                    found.note(frame)
        elif event == "c_call" and getattr(argument, "__self__", None) is shared:
            found.drew = True

    sys.setprofile(profile)
    try:
        yield found
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # one in C, such as cProfile's: only it can put itself back
            sys.setprofile(None)
            getattr(before, "enable", lambda: None)()


def is_known(table: Mapping[str, Any]) -> bool:
    """Whether a module's globals are those of torch or of Python itself, by name and, where names are common, by place."""
    name = str(table.get("__name__"))
    top = name.partition(".")[0]
    if top in _PACKAGES:
        return True
    if top not in sys.stdlib_module_names:
        return False
    module = sys.modules.get(name)
    return is_pythons(module) if module is not None and vars(module) is table else "__file__" not in table


def _given(code: CodeType) -> tuple[str, ...]:
    """The variables that a function starts with: its arguments, and those of the functions around it."""
    return (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars)


def _texts(constants: Any) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def makes_names(steps: Sequence[Step]) -> bool:
    """Whether a function may read attributes by names that do not stand in its code: `getattr(x, name)`, or `case Point(0)`."""
    for i, step in enumerate(steps):
        if step[0] == "MATCH_CLASS" and step[1]:
            return True
        if step in _ASKING:
            rest = list(takewhile(lambda s: not s[0].startswith("CALL"), steps[i + 1 :]))
            if not rest or rest[0][0] not in ("LOAD VARIABLE", "LOAD_GLOBAL"):
                return True
            rest = list(dropwhile(lambda s: s[0] == "ATTRIBUTE", rest[1:]))
            if not rest or rest[0][0] != "CONSTANT" or not isinstance(rest[0][1], str):
                return True
            if any(s[0].startswith(("BINARY", "BUILD", "FORMAT")) for s in rest):
                return True
    return False


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


def chains(arguments: Sequence[str], steps: Sequence[Step]) -> Iterator[Chain]:
    """The reads in a function's code, each from where it starts to where something else happens to the value."""
    counted = {name for kind, name in steps if kind == "STORE_GLOBAL"}  # its own, such as a counter or "was told once"
    stored = Counter(name for kind, name in steps if kind in ("STORE VARIABLE", "DELETE VARIABLE"))
    variables = {name: Chain(name, (), True) for name in arguments if not stored[name]}
    for i, (kind, name) in enumerate(steps):
        if kind == "LOAD_GLOBAL" and name not in counted:
            start = Chain(name)
        elif kind == "LOAD VARIABLE" and name in variables:
            start = variables[name]
        else:
            continue
        links, at = _links(steps, i + 1, i > 0 and steps[i - 1] in _ASKING)
        chain = replace(start, links=start.links + links)
        if at < len(steps) and steps[at][0] == "STORE VARIABLE" and stored[steps[at][1]] == 1:
            variables[steps[at][1]] = chain
        if not chain.of_argument or chain.links:
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


def _read(chain: Chain, table: dict[str, Any], arguments: Mapping[str, Any]) -> Iterator[Outside]:
    """What a chain passes on its way to a plain value, as far as no other guard looks at it."""
    way: list[Outside] = []
    if chain.of_argument:
        if chain.start not in arguments:
            return
        value = arguments[chain.start]
        name = type(value).__name__
    else:
        if chain.start not in table:
            return
        value, name = table[chain.start], f"the global {table.get('__name__')}.{chain.start}"
        way.append(Outside(table, chain.start, value, name))
    for kind, key in chain.links:
        if lasts(value):
            break
        link = _link(value, kind, key, name)
        if link is None:
            break
        # What an object of the model has itself, or a module from its class, is held already as the attribute that was read.
        if not chain.of_argument:
            way.append(link)
        elif not (is_a(value, nn.Module) or _has_itself(value, key)):
            way.append(replace(link, owner=value))
        value, name = link.value, link.name
        if kind == "asked":
            break
    if lasts(value) or value is MISSING:
        yield from way


def _link(value: Any, kind: str, key: Any, name: str) -> Outside | None:
    """What one link of a chain leads to; None where that can't be told without running the model's code."""
    if kind == "item":
        # To ask a defaultdict would put something there.
        if not is_a(value, (dict, list, tuple)) or (is_a(value, dict) and key not in value):
            return None
        found = Outside(value, key, MISSING, "").now()
        return None if found is MISSING else Outside(value, key, found, f"{name}[{key!r}]")
    if _is_torchs(value):
        return None
    there = inspect.getattr_static(value, key, MISSING)
    if there is MISSING and is_a(value, dict) and key in value and getattr(value, key, MISSING) is value[key]:
        return Outside(value, key, value[key], f"{name}.{key}")  # a dict whose keys can be read as attributes
    if is_a(there, MemberDescriptorType):
        there = getattr(value, key, MISSING)
    table = vars(value) if is_a(value, ModuleType) else Slots(value)
    if there is MISSING:
        finds_more = hasattr(type(value), "__getattr__")
        own = own_of(value)
        return None if finds_more or own is None else Outside(own, key, MISSING, f"{name}.{key}")
    return None if hasattr(type(there), "__get__") else Outside(table, key, there, f"{name}.{key}")


def _has_itself(value: Any, key: Any) -> bool:
    """Whether an object has an attribute, or a container an item, of its own and not from its class."""
    if is_a(value, (dict, list, tuple)) or key in (own_of(value) or ()):
        return True
    return isinstance(inspect.getattr_static(value, key, None), MemberDescriptorType)


def _is_torchs(value: Any) -> bool:
    """Whether a global is a tensor, a weak proxy, or a module or class of torch or of Python itself."""
    if is_a(value, (torch.Tensor, *weakref.ProxyTypes)):
        return True
    if not is_a(value, (ModuleType, type)):
        return False
    home = value.__name__ if is_a(value, ModuleType) else value.__module__
    module = sys.modules.get(str(home))
    return module is not None and is_known(vars(module))
