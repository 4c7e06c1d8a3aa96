"""Instructions: the few in a function's code that tell what it loads, assigns and imports outside of itself."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType
from typing import Any

# What the names of instructions end in that load, assign or delete a global, in any code.
_GLOBAL = ("_GLOBAL", "_GLOBALS", "_NAME")
_BESIDE = ("STORE_ATTR", "DELETE_ATTR", "STORE_DEREF")
_BY_NAME = frozenset({"modules", "import_module", "__import__"})
# What leads to globals by their names as texts.
_BY_TEXT = frozenset({"globals", "__globals__", "modules", "import_module", "__import__", "eval", "exec", "f_globals"})
_ASKED = frozenset(op for name, op in dis.opmap.items() if name.endswith(_GLOBAL) or name in _BESIDE)


@lru_cache(maxsize=4096)
def told_in(code: CodeType) -> tuple[tuple[str, Any], ...]:
    """The instructions that load, assign or delete a global or a name, assign an attribute or a variable of a function around, or
    import: their names, with what they name. Before an import stand whole numbers that are loaded, too: one is its level.
    """
    ops = code.co_code[::2]
    asked = _ASKED.intersection(ops)
    if asked <= _IN_NAMES.keys():  # of most functions; `dis` takes ten times as long
        return tuple(dict.fromkeys(_by_position(code, ops))) if asked else ()
    return tuple(
        (step.opname, step.argval)
        for step in dis.get_instructions(code)
        if step.opcode in _ASKED or (type(step.argval) is int and step.opname.startswith("LOAD"))
    )


def _by_position(code: CodeType, ops: bytes) -> list[tuple[str, str]]:
    """The same for instructions whose arguments are positions among the names of a code."""
    arguments, found = code.co_code[1::2], []
    for at, op in enumerate(ops):
        if op not in _IN_NAMES:
            continue
        argument, before = arguments[at], at - 1
        while before >= 0 and ops[before] == dis.EXTENDED_ARG:
            argument |= arguments[before] << 8 * (at - before)
            before -= 1
        found.append((dis.opname[op], code.co_names[argument >> _IN_NAMES[op]]))
    return found


def _in_names() -> dict[int, int]:
    """The instructions whose argument, moved by so many bits, is a position among a code's names on this Python."""

    def probe() -> None:
        first.second = third  # type: ignore[name-defined] # noqa: F821
        del fourth.second, fourth.fifth  # type: ignore[name-defined] # noqa: F821
        sixth.fifth = seventh  # type: ignore[name-defined] # noqa: F821

    names, found = probe.__code__.co_names, dict[int, int]()
    steps = [step for step in dis.get_instructions(probe) if step.opcode in _ASKED and step.arg is not None]
    for op in {step.opcode for step in steps}:
        uses = [(step.arg or 0, step.argval) for step in steps if step.opcode == op]
        for bits in (0, 1):
            if all(names[arg >> bits : (arg >> bits) + 1] == (name,) for arg, name in uses):
                found[op] = bits
    return found


_IN_NAMES = _in_names()


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names in a function's code, and in that of functions inside; not those that no source can hold, which tools put there."""
    own = frozenset(filter(str.isidentifier, code.co_names))
    return own.union(*(names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


@lru_cache(maxsize=4096)
def globals_in(code: CodeType) -> frozenset[str]:
    """The names in a code that may mean its globals: those that it loads or assigns as such, not those of attributes alone.

    Where it has the globals as a dict, or modules by their names, any name and any text in it may. Not those that no source can
    hold, which tools put there: pytest puts `@pytest_ar` where it rewrites `assert`, from which a way leads to all that it knows.
    """
    found = {name for kind, name in told_in(code) if kind.endswith(_GLOBAL)}
    if not _BY_TEXT.isdisjoint(code.co_names):
        found.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
    return frozenset(filter(str.isidentifier, found))


@lru_cache(maxsize=4096)
def all_globals_in(code: CodeType) -> frozenset[str]:
    """The same, with those of functions inside."""
    return globals_in(code).union(*(all_globals_in(c) for c in code.co_consts if isinstance(c, CodeType)))


@lru_cache(maxsize=4096)
def written_in(code: CodeType) -> frozenset[str]:
    """The names of the attributes that a function assigns, by `setattr` too; with those of functions inside."""
    found = {name for kind, name in told_in(code) if kind in ("STORE_ATTR", "DELETE_ATTR")}
    if "setattr" in code.co_names:
        found |= words_in(code)
    return frozenset(found.union(*(written_in(c) for c in code.co_consts if isinstance(c, CodeType))))


@lru_cache(maxsize=4096)
def imported_in(code: CodeType) -> tuple[str, ...]:
    """The modules that a function imports or may ask for, named as `import_module` has them; with those of functions inside."""
    found, level = list[str](), 0
    for kind, named in told_in(code):
        if type(named) is int:
            level = named
        elif kind == "IMPORT_NAME":
            found.append("." * level + named)
    if not _BY_NAME.isdisjoint(code.co_names):
        compared = _compared_in(code)
        found += (c for c in code.co_consts if isinstance(c, str) and c and c not in compared)
    return (*found, *(name for c in code.co_consts if isinstance(c, CodeType) for name in imported_in(c)))


def _compared_in(code: CodeType) -> set[str]:
    """The texts in a function's code that it does nothing with but compare what was loaded before, as in `== "__main__"`.

    What was compared may be a name itself, by which a module is asked for then: that one is known where the code that makes it is.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    pairs = [*zip(steps, (*steps[1:], None), strict=True)]
    loaded = [(step.argval, after) for step, after in pairs if isinstance(step.argval, str) and "CONST" in step.opname]
    others = {word for word, after in loaded if after is None or after.opname != "COMPARE_OP"}
    return {word for word, _ in loaded} - others


@lru_cache(maxsize=4096)
def words_in(code: CodeType) -> frozenset[str]:
    """The texts in a function's code that may be names."""
    return frozenset(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())


@lru_cache(maxsize=4096)
def assigned_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The variables of functions around, and the globals, that a function assigns; with those of functions inside."""
    inner = [assigned_in(c) for c in code.co_consts if isinstance(c, CodeType)]
    steps = told_in(code)
    around = {name for kind, name in steps if kind == "STORE_DEREF"}.union(*(a for a, _ in inner))
    counted = {name for kind, name in steps if kind in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME")}
    if "globals" in code.co_names:
        counted |= words_in(code)
    counted = counted.union(*(b for _, b in inner))
    return frozenset(around), frozenset(counted)
