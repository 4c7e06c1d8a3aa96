"""Steps: what a function reads from its surroundings and its arguments, as the instructions in its code say."""

from __future__ import annotations

import dis
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, pairwise, takewhile
from types import CodeType
from typing import Any

_SILENT = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL")
WHOLESALE = frozenset(
    "__dict__ __getstate__ __reduce_ex__ asdict astuple attrgetter format getmembers model_dump repr vars".split()
)
_CALLING = ("torch.nn.", "torch.functional")  # whose Python calls what users replace: `F.gelu`
_NOT_CALLING = "torch.nn.modules.module"
_CHANGES = frozenset(
    "add append appendleft clear discard extend insert move_to_end pop popitem popleft remove reverse setdefault sort "
    "update".split()
)
_PUTTING = frozenset({"setdefault", "update"})
_ENTERING = ("BEFORE_WITH", "BEFORE_ASYNC_WITH")
_KEYS = ("LOAD_GLOBAL", "LOAD VARIABLE", "CONSTANT", "ATTRIBUTE", "SUBSCRIPT")
IMPORT_MODULE: CodeType = importlib.import_module.__code__

Step = tuple[str, Any]
_ASKING: tuple[Step, ...] = (("LOAD_GLOBAL", "getattr"), ("LOAD_GLOBAL", "hasattr"))


@dataclass(frozen=True, slots=True)
class Chain:
    """A read in a function's code: from a global or an argument of this name, by these links.

    A link is (kind, key): an attribute by its name, an item by its key, or an attribute that is asked for by `getattr`.
    """

    start: str
    links: tuple[tuple[str, Any], ...] = ()
    of_argument: bool = False
    entered: bool = False  # by a `with`, and nothing else
    imported: bool = False  # from the module of this name, by an import inside of the function


class Dropped(str):
    """The name of a method whose result is dropped where it is called: `log.info(...)` alone in a line."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Code:
    """A function's code: the reads in it, whether it may read attributes by any name, and the names that it `owned`.

    Those are what it assigns to, or changes the contents of, itself: a counter, a cache.
    """

    code: CodeType  # kept, so that its id stays its own
    chains: tuple[Chain, ...]
    wholesale: bool
    owned: frozenset[str]
    of_others: bool
    every_global: bool = False  # it asks `globals()` for a name that it makes

    which: frozenset[str] = frozenset()  # what it asks of things by which they are

    past_own: bool = False  # it asks `super().__getattribute__`, past what its own class makes of a read
    naming: frozenset[str] = frozenset()  # variables that hold names which `getattr` and `hasattr` are asked for
    assigned: frozenset[str] = frozenset()  # attributes that it assigns
    filled: frozenset[str] = frozenset()  # attributes that it reads, where it puts something into a container

    @classmethod
    def of(cls, code: CodeType, others: bool, module: str) -> Code:
        """What stands in a function's code; kept, as each capture asks the same codes."""
        at = id(code), others, module
        found = _KNOWN.get(at)
        if found is None:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            found = _KNOWN[at] = cls._read(code, others, module)
        return found

    @classmethod
    def _read(cls, code: CodeType, others: bool, module: str) -> Code:
        calling = others and module.startswith(_CALLING) and module != _NOT_CALLING
        steps = list(plain_steps(marked(dis.get_instructions(code)))) if calling or not others else []
        assigned = frozenset(name for kind, name in steps if kind == "STORE_ATTR")
        fills = any(kind == "STORE_SUBSCR" for kind, _ in steps) or not _PUTTING.isdisjoint(code.co_names)
        filled = frozenset(name for kind, name in steps if kind == "ATTRIBUTE") if fills else frozenset()
        steps = [("CONSTANT", module) if step == ("LOAD_GLOBAL", "__name__") else step for step in steps]
        if calling:
            return cls(code, tuple(c for c in chains((), steps) if not c.of_argument), False, frozenset(), True)
        found = [*chains(starts_with(code), steps)]
        by_name = "globals" in code.co_names
        if by_name:
            found += [Chain(text) for text in texts(code.co_consts)]
        naming = names_by(steps)
        wholesale = not WHOLESALE.isdisjoint(code.co_names) or ("LOAD_GLOBAL", "dir") in steps or naming is None
        of_own = [i for i in range(len(steps)) if of_super(steps, i, code)]
        every = by_name and asks_for_any_global(steps)
        return cls(
            code,
            tuple(found),
            wholesale,
            frozenset(owned_by(steps)),
            others,
            every,
            frozenset(asks_which([step for i, step in enumerate(steps) if i not in of_own])),
            bool(of_own),
            naming or frozenset(),
            assigned,
            filled,
        )


_KNOWN: dict[
    tuple[int, bool, str], Code
] = {}  # the codes that were looked at, which these keep alive, so that ids stay theirs
_MOST_KNOWN = 1 << 14


def asks_for_any_global(steps: Sequence[Step]) -> bool:
    """Whether what `globals()` gives is asked for a name that stands in no code."""
    for i, step in enumerate(steps):
        if step == ("LOAD_GLOBAL", "globals"):
            after = [s for s in steps[i + 1 : i + 7] if not s[0].startswith(("CALL", "ATTRIBUTE", "PUSH"))]
            if not after or after[0][0] != "CONSTANT" or _makes_text(steps[i + 1 : i + 7]):
                return True
    return False


_CLASSES = {("LOAD_GLOBAL", "type"), ("LOAD_GLOBAL", "isinstance"), ("ATTRIBUTE", "__class__")}
_KINDS = {("LOAD_GLOBAL", "type"), ("LOAD_GLOBAL", "dir"), ("ATTRIBUTE", "__class__")}
_NAMES = {("ATTRIBUTE", "__name__"), ("ATTRIBUTE", "__qualname__")}
_STATIC = {("ATTRIBUTE", "__getattribute__"), ("ATTRIBUTE", "getattr_static"), ("LOAD_GLOBAL", "getattr_static")}
_STATIC |= {("LOAD_SUPER_ATTR", "__getattribute__")}  # since Python 3.12
_CLASSES |= {(kind, name) for kind in ("LOAD_GLOBAL", "ATTRIBUTE") for name in ("Parameter", "Buffer")}


def asks_which(steps: Sequence[Step]) -> Iterator[str]:
    """What a function asks of things by which they are: "none", whether there is one; "ties", whether two are one, of which neither
    is a constant or a global; "class", of which class one is; "kinds", what a class has, and "names", what it is called; "static",
    attributes by a way around `__getattr__`.
    """
    if any(kind.endswith("_NONE") for kind, _ in steps) or (("CONSTANT", None), ("IS_OP", 0)) in pairwise(
        (kind, 0 if kind == "IS_OP" else key) for kind, key in steps
    ):
        yield "none"
    if ("LOAD_GLOBAL", "id") in steps or any(
        a[0] not in ("CONSTANT", "LOAD_GLOBAL") for a, b in pairwise(steps) if b[0] == "IS_OP"
    ):
        yield "ties"
    if not _KINDS.isdisjoint(steps_of := [s for s in steps if s[0] in ("LOAD_GLOBAL", "ATTRIBUTE")]):
        yield "kinds"
    if not _NAMES.isdisjoint(steps_of):
        yield "names"
    if not _STATIC.isdisjoint(steps):
        yield "static"
    if not _CLASSES.isdisjoint(steps_of):
        yield "class"


def _makes_text(steps: Iterable[Step]) -> bool:
    """Whether something is put together in these steps."""
    return any(s[0].startswith(("BINARY", "BUILD_STRING", "FORMAT")) for s in steps)


def owned_by(steps: Sequence[Step]) -> Iterator[str]:
    """The globals and variables that a function assigns to, or the contents of which it changes."""
    for i, (kind, name) in enumerate(steps):
        if kind in ("STORE_GLOBAL", "STORE VARIABLE", "DELETE VARIABLE", "DELETE_GLOBAL"):
            yield name
        elif kind in ("LOAD_GLOBAL", "LOAD VARIABLE"):
            after = list(takewhile(lambda s: s[0] in _KEYS, steps[i + 1 : i + 8]))
            end = steps[i + 1 + len(after) : i + 2 + len(after)]
            if end and end[0][0] in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                yield name
            if after and after[0][0] == "ATTRIBUTE" and after[0][1] in _CHANGES:
                yield name


def starts_with(code: CodeType) -> tuple[str, ...]:
    """The variables that a function starts with: its arguments, and those of the functions around it."""
    return (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars)


def texts(constants: Any) -> Iterator[str]:
    """The texts among the constants in a code, those in tuples too."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from texts(constant)


def names_by(steps: Sequence[Step]) -> frozenset[str] | None:
    """The variables that hold the names of attributes which a function reads by `getattr(x, name)`, to be looked at when it does.

    None where it may read some by names that stand neither in its code nor in a variable: `getattr(x, f"f{i}")`, `case Point(0)`.
    """
    found: set[str] = set()
    for i, step in enumerate(steps):
        if step[0] == "MATCH_CLASS" and step[1]:
            return None
        if step in _ASKING:
            rest = list(takewhile(lambda s: not s[0].startswith("CALL"), steps[i + 1 :]))
            call = steps[i + 1 + len(rest) : i + 2 + len(rest)]
            if not rest or rest[0][0] not in ("LOAD VARIABLE", "LOAD_GLOBAL"):
                return None
            rest = list(dropwhile(lambda s: s[0] == "ATTRIBUTE", rest[1:]))
            if any(s[0].startswith(("BINARY", "BUILD", "FORMAT")) for s in rest):
                return None
            if rest and rest[0][0] == "LOAD VARIABLE" and _takes_all(rest, call):
                found.add(rest[0][1])
            elif not rest or rest[0][0] != "CONSTANT" or not isinstance(rest[0][1], str):
                return None
    return frozenset(found)


def _takes_all(given: Sequence[Step], call: Sequence[Step]) -> bool:
    """Whether a call takes a thing, and what these steps give, one thing each, and no more."""
    simple = len(given) <= 2 and all(s[0] in ("LOAD VARIABLE", "LOAD_GLOBAL", "CONSTANT") for s in given)
    return simple and [s[1] for s in call] == [1 + len(given)]


def of_super(steps: Sequence[Step], i: int, code: CodeType) -> bool:
    """Whether a step is `super().__getattribute__`, which reads of the function's first argument alone."""
    kind, name = steps[i]
    before = [*steps[max(i - 3, 0) : i]]
    if name != "__getattribute__" or not code.co_argcount:
        return False
    if kind == "LOAD_SUPER_ATTR":  # since Python 3.12
        own = [("LOAD_GLOBAL", "super"), ("LOAD VARIABLE", "__class__"), ("LOAD VARIABLE", code.co_varnames[0])]
        return before == own
    return kind == "ATTRIBUTE" and before[-2:] == [("LOAD_GLOBAL", "super"), ("CALL", 0)]


def marked(steps: Iterable[dis.Instruction]) -> list[dis.Instruction]:
    """The steps, with the names of methods marked whose results are dropped right after their calls."""
    found = [s for s in steps if s.opname not in ("CACHE", "EXTENDED_ARG")]
    for i, step in enumerate(found):
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR") and _is_dropped(found, i):
            found[i] = step._replace(argval=Dropped(step.argval))
    return found


def _is_dropped(steps: Sequence[dis.Instruction], at: int) -> bool:
    depth, i = 0, at
    for _ in range(256):
        if i + 1 >= len(steps) or depth < 0:
            return False
        depth += dis.stack_effect(steps[i].opcode, steps[i].arg, jump=False)
        called = i > at and steps[i].opname.startswith("CALL")
        if depth == 0:  # an attribute that is called is two things on the stack
            return called and steps[i + 1].opname == "POP_TOP"
        i += 1
        if steps[i - 1].opname == "JUMP_FORWARD":  # past the other side of a choice
            i = next((k for k in range(i, len(steps)) if steps[k].offset >= steps[i - 1].argval), len(steps))
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
        elif step.opname == "LOAD_NAME":  # in what `eval` runs
            yield "LOAD_GLOBAL", step.argval
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield "ATTRIBUTE", step.argval
        elif step.opname not in _SILENT:
            yield step.opname, step.argval


def chains(arguments: Sequence[str], steps: Sequence[Step]) -> Iterator[Chain]:
    """The reads in a function's code, each from where it starts to where something else happens to the value."""
    steps = through_type(steps)
    counted = {name for kind, name in steps if kind == "STORE_GLOBAL"}  # its own, such as a counter or "was told once"
    stored = Counter(name for kind, name in steps if kind in ("STORE VARIABLE", "DELETE VARIABLE"))
    variables = {name: Chain(name, (), True) for name in arguments if not stored[name]}
    for i, (kind, name) in enumerate(steps):
        if kind == "IMPORT_NAME":
            for variable, chain in _imported(steps, i):
                if stored[variable] == 1:
                    variables[variable] = chain
                yield chain
            continue
        if kind == "LOAD_GLOBAL" and name not in counted and name.isidentifier():  # tools put others there
            start = Chain(name)
        elif kind == "LOAD VARIABLE" and name in variables:
            start = variables[name]
        else:
            continue
        links, at = _links(steps, i + 1, i > 0 and steps[i - 1] in _ASKING)
        entered = at < len(steps) and steps[at][0] in _ENTERING
        chain = replace(start, links=start.links + links, entered=entered)
        if at < len(steps) and steps[at][0] == "STORE VARIABLE" and stored[steps[at][1]] == 1:
            variables[steps[at][1]] = chain
        if not chain.imported or chain.links:
            yield chain


def through_type(steps: Sequence[Step]) -> list[Step]:
    """The steps with `type(x).name` as `x.__class__.name`, which reads the same."""
    found = list(steps)
    for i in (i for i, step in enumerate(steps) if step == ("LOAD_GLOBAL", "type")):
        start = steps[i + 1 : i + 2]
        if start and start[0][0] in ("LOAD VARIABLE", "LOAD_GLOBAL"):
            at = i + 2 + len(list(takewhile(lambda s: s[0] == "ATTRIBUTE", steps[i + 2 :])))
            called, (then, name) = steps[at : at + 2] if len(steps) > at + 1 else (("", None), ("", None))
            named = then == "ATTRIBUTE" and str(name)[:2] != "__"
            if called == ("CALL", 1) and (named or then == "STORE VARIABLE"):
                found[at] = "ATTRIBUTE", "__class__"
    return found


def _imported(steps: Sequence[Step], at: int) -> Iterator[tuple[str, Chain]]:
    """The variables that an import inside of a function sets, and what they stand for."""
    level = steps[at - 2][1] if at > 1 and steps[at - 2][0] == "CONSTANT" else 0
    name = "." * (level if isinstance(level, int) else 0) + str(steps[at][1])
    after = steps[at + 1 : at + 64]
    if after and after[0][0] == "STORE VARIABLE":
        yield after[0][1], Chain(name.partition(".")[0], imported=True)
        return
    for (kind, part), *rest in zip(after, after[1:], after[2:], after[3:], strict=False):
        if kind == "IMPORT_FROM":
            variable = next((s[1] for s in rest if s[0] == "STORE VARIABLE"), None)
            if variable is not None:
                renamed = rest[0][0] != "STORE VARIABLE" and name.endswith(f".{part}")  # `import a.b as c`
                links = () if renamed else (("attribute", part),)
                yield variable, Chain(name, links, imported=True)
        elif kind not in ("STORE VARIABLE", "SWAP", "POP_TOP"):
            return


def _links(steps: Sequence[Step], at: int, asks: bool) -> tuple[tuple[tuple[str, Any], ...], int]:
    """The links that start at a step, and where they end."""
    found: list[tuple[str, Any]] = []
    while at < len(steps):
        kind, key = steps[at]
        if kind == "ATTRIBUTE":
            found.append(("attribute", key))
        elif kind == "CONSTANT" and steps[at + 1 : at + 2] == [("SUBSCRIPT", None)]:
            found.append(("item", key))
            at += 1
        elif kind == "CONSTANT" and asks and isinstance(key, str):
            if _makes_text(takewhile(lambda s: not s[0].startswith("CALL"), steps[at:])):
                break
            return (*found, ("asked", key)), at + 1
        else:
            break
        at += 1
    return tuple(found), at


NO_CODE = Code(IMPORT_MODULE, (), False, frozenset(), True)
