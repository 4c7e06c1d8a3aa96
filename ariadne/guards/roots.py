"""Roots: the variables and objects outside of a model that its hooks and its classes' own functions can reach.

What forward puts into them is found by looking at them before and after a run; so is what there is to put back.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.guards.attributes import (
    BOOKKEEPING,
    LEAVES,
    MISSING,
    Attribute,
    follow,
    is_a,
    is_array,
    is_memory,
    is_opaque,
    kind_of,
    own_of,
)
from ariadne.guards.classes import own_dict
from ariadne.guards.codes import around, globals_in, inside
from ariadne.guards.links import absolute, is_known

_SHORT = 256  # tables of functions that are longer are not looked through
_DEEP = 4  # containers in containers, and modules in modules, are looked through so far
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSORS_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_CALLED = (FunctionType, MethodType, partial)
_OF_A_THREAD = (threading.local, type(threading.RLock()), threading._RLock, threading.Condition)
_ATTRIBUTED = (type, FunctionType)  # global things that a function may assign attributes of
_BY_NAME = frozenset({"modules", "import_module", "__import__"})
_MEANING_A_CLASS = ("__class__", "type", "cls", "__func__")


@dataclass(frozen=True, slots=True)
class Root:
    """A variable, or an object, outside of the model: by `steps` from `thing` one comes to what it holds now.

    With `names`, the variables of these names themselves, of a cell, of a class or among the globals in `thing`.
    """

    name: str
    thing: Any
    steps: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()

    def now(self) -> Any:
        """What it holds now; `MISSING` where it holds nothing."""
        try:
            return follow(self.thing, self.steps)
        except (LookupError, AttributeError, ValueError, TypeError):
            return MISSING


@dataclass(frozen=True)
class Reached:
    """What forward can reach outside of a model: `roots`, and the results that `functools.lru_cache` keeps for its functions.

    `tensors`: those that a variable, a class or a default holds; `parts`: those of modules that stand there. `of_threads`: where
    things stand that are one thread's at a time, which are no roots: what threads keep for themselves, and locks.
    """

    roots: tuple[Root, ...] = ()
    memories: tuple[Any, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    parts: tuple[torch.Tensor, ...] = ()
    of_threads: tuple[Root, ...] = ()


def outside_of(modules: Mapping[str, nn.Module]) -> Reached:
    """The variables and objects outside of a model that its hooks, its classes' own functions and those it holds can reach.

    Its backward pass runs hooks of parameters, and functions of `autograd.Function`: theirs as well.
    """
    search = _Search()
    for module in modules.values():
        for table in _HOOKS:
            for hook in module.__dict__[table].values():
                search.enter(hook)
        for tensor in module._parameters.values():
            for table in _TENSORS_HOOKS if tensor is not None else ():
                for hook in (getattr(tensor, table, None) or {}).values():
                    search.enter(hook)
        kind: Any = type(module)
        for key, value in module.__dict__.items():
            if is_a(value, _CALLED) or is_memory(value):
                search.enter(value)
            elif (function := _applied(value)) is not None:
                search.consider(function, Root(function.__name__, function))
            elif key not in BOOKKEEPING and type(value) not in LEAVES:
                search.methods(value, _names_of(kind))
        search.of_class(kind)
    return search.all()


class _Search:
    def __init__(self) -> None:
        self.found: dict[tuple[int, tuple[Any, ...], bool], Root] = {}
        self.names: set[str] = set()
        self.seen: set[tuple[int, ...]] = set()
        self.known: dict[int, tuple[bool, Any]] = {}
        self.classes: dict[type, None] = {}
        self.declared: dict[
            type, set[str]
        ] = {}  # names in the model's own classes, which functions out of sight may assign
        self.functions: dict[int, FunctionType] = {}
        self.memories: dict[int, Any] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.parts: dict[int, torch.Tensor] = {}
        self.of_threads: dict[tuple[int, tuple[Any, ...]], Root] = {}
        self.written: set[str] = (
            set()
        )  # names of attributes that functions assign which may mean a class's or a function's
        self.named: set[str] = set()  # names in these functions
        self.todo: list[Any] = []  # what can be called, and is yet to be looked at
        self.looked: dict[tuple[int, ...], Any] = {}  # what was, and what holds others that can be called

    def all(self) -> Reached:
        """What was found, with the attributes of classes and functions that the functions found may assign.

        However many calls away: what forward does there is as much its own.
        """
        while self.todo:
            self.look(self.todo.pop())
        for cls in self.classes:
            names = {
                n for n in self.written | self.declared.get(cls, set()) if not hasattr(vars(cls).get(n), "__get__")
            }
            if names:
                self.keep(Root(cls.__name__, cls, (), tuple(sorted(names))))
        for f in self.functions.values():
            if f.__name__ in self.named and self.written:
                self.keep(Root(f"the attributes of {_called(f)}", f.__dict__))
        return Reached(
            tuple(self.found.values()),
            tuple(self.memories.values()),
            tuple(self.tensors.values()),
            tuple(self.parts.values()),
            tuple(self.of_threads.values()),
        )

    def of_class(self, cls: type) -> None:
        if (id(cls),) in self.seen:
            return
        self.seen.add((id(cls),))
        for base in cls.__mro__[:-1]:
            if base.__module__.partition(".")[0] == "torch" or base is nn.Module:
                continue
            self.classes[base] = None
            self.declared[base] = {n for n in vars(base) if not n.startswith("__")}
            for name, thing in list(vars(base).items()):
                if is_a(thing, (staticmethod, classmethod)):
                    thing = thing.__func__
                if is_a(thing, property):
                    thing = thing.fget
                if is_a(thing, cached_property):
                    thing = thing.func
                if is_a(thing, (FunctionType, partial)) or is_memory(thing):
                    self.enter(thing)
                elif not name.startswith("__"):
                    self.consider(thing, _of_class(base, name, thing))

    def enter(self, thing: Any) -> None:
        """Have a function, or something else that can be called, looked at."""
        self.todo.append(thing)

    def is_new(self, thing: Any) -> bool:
        """Whether a thing comes for the first time; a method is made anew whenever it is asked for."""
        method = is_a(thing, MethodType)
        at = (id(thing.__self__), id(thing.__func__)) if method else (id(thing),)
        if at in self.looked:
            return False
        self.looked[at] = thing
        return True

    def look(self, thing: Any) -> None:
        """Look at what something that can be called reaches."""
        if not self.is_new(thing):
            return
        if is_a(thing, partial):
            self.enter(thing.func)
            name = f"an argument of {_called(thing.func)}"
            for value in (*thing.args, *thing.keywords.values()):
                self.consider(value, Root(name, value))
        elif is_a(thing, MethodType):
            name = f"the {type(thing.__self__).__name__} of {_called(thing)}"
            self.consider(thing.__self__, Root(name, thing.__self__))
            self.enter(thing.__func__)
        elif is_memory(thing):
            if not is_known(getattr(thing.__wrapped__, "__globals__", {})):
                self.memories[id(thing)] = thing
            self.enter(thing.__wrapped__)
        elif is_a(thing, FunctionType):
            self.function(thing)
        elif callable(thing) and not is_opaque(thing):
            self.consider(thing, Root(f"the {type(thing).__name__} that is called", thing))
            self.enter(type(thing).__call__)

    def function(self, f: FunctionType) -> None:
        table = f.__globals__
        if id(table) not in self.known:
            self.known[id(table)] = is_known(table), table
        at = (id(f.__code__), id(table), *map(id, f.__closure__ or ()))
        if at in self.seen:
            return
        self.seen.add(at)
        if self.known[id(table)][0]:
            for inner in inside(f):  # what a decorator stands around
                self.enter(inner)
            return
        self.functions[id(f)] = f
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            root = Root(f"the variable {name!r} of {_called(f)}", cell, (Attribute("cell_contents"),))
            self.consider(root.now(), root)
            if name in _assigned(f.__code__)[0]:
                self.keep(Root(root.name, cell, (), ("cell_contents",)))
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self.consider(value, Root(f"a default argument of {_called(f)}", value))
        counted = sorted(_assigned(f.__code__)[1])
        if counted:
            self.keep(Root(f"the globals of {f.__module__}", table, (), tuple(counted)))
        names = {*_names(f.__code__)}
        named = names | _words(f.__code__) if "getattr" in names else names
        for name in sorted(_globals(f.__code__) & table.keys()):
            self.consider(table[name], Root(f"the global {name!r}", table, (name,)), named)
        for name in _imported(f.__code__):
            module = sys.modules.get(absolute(name, table))
            self.consider(module, Root(name, module), named)
        written = _written(f.__code__)
        means = not {*_MEANING_A_CLASS}.isdisjoint({*names, *f.__code__.co_varnames, *f.__code__.co_freevars})
        if written and (means or any(is_a(table.get(name), _ATTRIBUTED) for name in names)):
            self.written |= written
            self.named |= names

    def consider(self, value: Any, root: Root, names: Iterable[str] = (), deep: int = 0) -> None:
        """Keep a root, if something can be put into what it holds; go on from there if it can be called."""
        value = _applied(value) or value
        if is_a(value, _OF_A_THREAD):
            self.of_threads.setdefault((id(root.thing), root.steps), root)
        held = value if is_a(value, tuple) else (value,)
        self.tensors.update((id(t), t) for t in held if is_a(t, torch.Tensor))
        if is_a(value, nn.Module):
            self.parts.update((id(t), t) for t in (*value.parameters(), *value.buffers()))
        if is_a(value, type) and issubclass(value, torch.autograd.Function) and value not in self.classes:
            self.declared[value] = {n for n in vars(value) if not n.startswith("__")}
            for inner in vars(value).values():
                self.enter_all(inner)
            names = {*names, *_names_of(value)}
        if is_a(value, type) and not is_known(getattr(sys.modules.get(value.__module__), "__dict__", {})):
            self.classes[value] = None
        if is_a(value, _CALLED) or is_memory(value):
            self.enter(value)
        elif is_a(value, ModuleType) and not is_known(vars(value)):
            for name in sorted({*names} & vars(value).keys()) if deep < _DEEP else ():
                at = Root(f"{value.__name__}.{name}", vars(value), (name,))
                self.consider(vars(value)[name], at, names if is_a(at.now(), ModuleType) else (), deep + 1)
        elif is_a(value, type) and not is_a(value, ModuleType) and not issubclass(value, nn.Module):
            if value.__module__.partition(".")[0] != "torch":
                for name in sorted({*names} & vars(value).keys()):
                    inner = vars(value)[name]
                    if is_a(inner, FunctionType) or around(inner):
                        self.enter_all(inner)
                    elif not is_opaque(inner) or is_a(inner, _OF_A_THREAD):
                        self.consider(inner, _of_class(value, name, inner))
        elif type(value) not in LEAVES and value is not MISSING and not is_opaque(value) and not is_array(value):
            self.keep(root)
            self.todo += _table(value)
            for inner in (own_of(value) or {}).values():
                self.todo += [inner] if is_a(inner, _CALLED) or is_memory(inner) else _table(inner)
            self.methods(value, names)

    def methods(self, value: Any, names: Iterable[str], deep: int = 0) -> None:
        """Look at what the methods of these names, and functions held under them, reach: of an object of a user's class, or of
        those in a short container, such as a registry.
        """
        if type(value) in (list, tuple, dict):
            if len(value) <= _SHORT and deep < _DEEP:
                for inner in value.values() if type(value) is dict else value:
                    self.methods(inner, names, deep + 1)
        elif not is_opaque(value):
            own = own_of(value) or {}
            self.todo += [own[n] for n in sorted({*names} & own.keys()) if is_a(own[n], _CALLED) or is_memory(own[n])]
            for cls in type(value).__mro__[:-1]:
                if not is_known({"__name__": cls.__module__}):
                    for name in sorted({*names, "__call__"} & vars(cls).keys()):
                        self.enter_all(vars(cls)[name])

    def enter_all(self, thing: Any) -> None:
        """The same of what stands in a class, be it a function, a property or a static method."""
        self.todo += [thing] if is_a(thing, FunctionType) else around(thing)

    def keep(self, root: Root) -> None:
        if not root.names and not kind_of(root.now()):
            return
        key = id(root.thing), root.steps, bool(root.names)
        if key in self.found:
            names = tuple(dict.fromkeys((*self.found[key].names, *root.names)))
            self.found[key] = replace(self.found[key], names=names)
            return
        name, i = root.name, 1
        while name in self.names:
            i += 1
            name = f"{root.name} ({i})"
        self.names.add(name)
        self.found[key] = replace(root, name=name)


def _applied(value: Any) -> type | None:
    """The `autograd.Function` whose `apply` a value is."""
    owner = getattr(value, "__self__", None) if is_a(value, BuiltinFunctionType) else None
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


@lru_cache(maxsize=1024)
def _names_of(cls: type) -> frozenset[str]:
    """The names in the functions of a class, but for torch's own."""
    own = (base for base in cls.__mro__[:-1] if base.__module__.partition(".")[0] != "torch")
    functions = (f for base in own for thing in vars(base).values() for f in (thing, *around(thing)))
    return frozenset(name for f in functions if is_a(f, FunctionType) for name in _names(f.__code__))


def _table(value: Any) -> list[Any]:
    """The functions in a short table of such, which forward may choose from."""
    if not is_a(value, (dict, list, tuple)) or len(value) > _SHORT:
        return []
    inner = dict.values(value) if is_a(value, dict) else value
    return [thing for thing in inner if is_a(thing, _CALLED)]


def _of_class(cls: type, name: str, thing: Any) -> Root:
    """What stands in a class under a name: by the name, so that another that is put there is found."""
    table, what = own_dict(cls), f"{cls.__name__}.{name}"
    return Root(what, table, (name,)) if table.get(name) is thing else Root(what, thing)


def _names(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in that of functions inside; not those that no source can hold, which tools put there."""
    yield from filter(str.isidentifier, code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _globals(code: CodeType) -> frozenset[str]:
    """The names in a function's code, and in that of functions inside, that may mean its globals."""
    return globals_in(code).union(*(_globals(c) for c in code.co_consts if isinstance(c, CodeType)))


@lru_cache(maxsize=4096)
def _written(code: CodeType) -> frozenset[str]:
    """The names of the attributes that a function assigns, by `setattr` too; with those of functions inside."""
    found = {s.argval for s in dis.get_instructions(code) if s.opname in ("STORE_ATTR", "DELETE_ATTR")}
    if "setattr" in code.co_names:
        found |= _words(code)
    return frozenset(found.union(*(_written(c) for c in code.co_consts if isinstance(c, CodeType))))


@lru_cache(maxsize=4096)
def _imported(code: CodeType) -> tuple[str, ...]:
    """The modules that a function imports or may ask for, named as `import_module` has them; with those of functions inside."""
    found, level = list[str](), 0
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD") and type(step.argval) is int:
            level = step.argval
        elif step.opname == "IMPORT_NAME":
            found.append("." * level + step.argval)
    if not _BY_NAME.isdisjoint(code.co_names):
        found += (c for c in code.co_consts if isinstance(c, str) and c)
    return (*found, *(name for c in code.co_consts if isinstance(c, CodeType) for name in _imported(c)))


def _words(code: CodeType) -> set[str]:
    return {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}


@lru_cache(maxsize=4096)
def _assigned(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The variables of functions around, and the globals, that a function assigns; with those of functions inside."""
    inner = [_assigned(c) for c in code.co_consts if isinstance(c, CodeType)]
    steps = [(s.opname, s.argval) for s in dis.get_instructions(code)]
    around = {name for kind, name in steps if kind == "STORE_DEREF"}.union(*(a for a, _ in inner))
    counted = {name for kind, name in steps if kind in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME")}
    if "globals" in code.co_names:
        counted |= _words(code)
    counted = counted.union(*(b for _, b in inner))
    return frozenset(around), frozenset(counted)


def _called(f: Any) -> str:
    return str(getattr(f, "__qualname__", None) or getattr(f, "__name__", type(f).__name__)).replace("<locals>.", "")
