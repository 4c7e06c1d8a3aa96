"""Roots: the variables and objects outside of a model that its hooks and its classes' own functions can reach.

What forward puts into them is found by looking at them before and after a run; so is what there is to put back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.guards.attributes import (
    BOOKKEEPING,
    LEAVES,
    MISSING,
    Attribute,
    bound_to,
    follow,
    held,
    is_a,
    is_bare,
    is_iterator,
    is_memory,
    is_opaque,
    is_ours,
    is_raw,
    is_torchs_own,
    keeps_state,
    kinds_of,
)
from ariadne.guards.classes import own_dict
from ariadne.guards.codes import around, inside
from ariadne.guards.instructions import all_globals_in, assigned_in, imported_in, names_in, words_in, written_in
from ariadne.guards.links import absolute, is_known
from ariadne.guards.searched import TENSORS_HOOKS, Code, Read, found_again

_DEEP = 4  # modules in modules are looked through so far
_MOST, _LARGE = 1 << 15, 4096  # things that are looked into; names in a module
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CALLED = (FunctionType, MethodType, partial)
_HOLDING_NOTHING = LEAVES - {type, FunctionType}
_OF_A_THREAD = (threading.local, type(threading.RLock()), threading._RLock, threading.Condition)
_ATTRIBUTED = (type, FunctionType)  # things that a function may assign attributes of
_MEANING_A_CLASS = ("__class__", "type", "cls", "__func__")
_CONTENTS = Attribute("cell_contents")
_At = tuple[int, tuple[Any, ...]]  # the id of a thing, and steps from it


@dataclass(frozen=True, slots=True)
class Root:
    """A variable, or an object, outside of the model: by `steps` from `thing` one comes to what it holds now.

    With `names`, the variables of these names themselves, of a cell, of a class or among the globals in `thing`.
    """

    name: str
    thing: Any
    steps: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()

    def now(self) -> Any:
        """What it holds now; `MISSING` where it holds nothing."""
        try:
            return follow(self.thing, self.steps)
        except (LookupError, AttributeError, ValueError, TypeError):
            return MISSING

    def is_empty(self) -> bool:
        """Whether it is a dict that holds nothing, as the attributes of most functions do."""
        return type(self.thing) is dict and not (self.thing or self.steps or self.names)


@dataclass(frozen=True)
class Reached:
    """What forward can reach outside of a model: `roots`, and the results that `functools.lru_cache` keeps for its functions.

    `tensors`: those that a variable, a class or a default holds; `parts`: those of modules that stand there. `of_threads`: where
    things stand that are one thread's at a time, which are no roots: what threads keep for themselves, and locks. `moving`: where
    arrays, bytes, iterators and methods in C stand, which are none, for they hold nothing by name, and change by themselves.
    `keeping`: where things of Python's own or of C's stand that keep state to themselves, such as events, generators of numbers and
    text in memory.
    """

    roots: tuple[Root, ...] = ()
    memories: tuple[Any, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    parts: tuple[torch.Tensor, ...] = ()
    of_threads: tuple[Root, ...] = ()
    moving: tuple[Root, ...] = ()
    keeping: tuple[Root, ...] = ()


def outside_of(modules: Mapping[str, nn.Module]) -> Reached:
    """The variables and objects outside of a model that its hooks, its classes' own functions and those it holds can reach.

    Its backward pass runs hooks of parameters, and functions of `autograd.Function`: theirs as well.
    """

    def search() -> tuple[Read, Reached]:
        looking = _Search()
        for module in modules.values():
            looking.of_module(module)
        return looking.read, looking.all()

    return found_again(modules, search)


def outside_with_code(modules: Mapping[str, nn.Module], hooks: Iterable[Any]) -> tuple[Reached, Code]:
    """The same, by these hooks for all modules, too; with the code that it was found by: where that stands no more, it is to be
    looked for again."""
    looking = _Search()
    for module in modules.values():
        looking.of_module(module)
    for hook in hooks:
        looking.enter(hook)
    found = looking.all()
    return found, Code(looking.read, looking.every)


class _Search:
    def __init__(self) -> None:
        self.read = Read()  # whatever is looked into is noted here, before it is
        self.found: dict[tuple[int, tuple[Any, ...], bool], Root] = {}
        self.names, self.seen = set[str](), set[tuple[int, ...]]()
        self.known: dict[int, tuple[bool, Any]] = {}
        self.classes: dict[type, None] = {}
        self.declared = dict[type, set[str]]()  # names in the model's own classes, which others may assign out of sight
        self.functions: dict[int, FunctionType] = {}
        self.memories: dict[int, Any] = {}
        self.tensors, self.parts = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        self.of_threads, self.moving, self.keeping = dict[_At, Root](), dict[_At, Root](), dict[_At, Root]()
        self.written = set[str]()  # names of attributes that functions assign, which may mean a class's or a function's
        self.assigning: set[str] = set()  # names in those of them that may mean a function's
        self.runs = True  # what is looked at now is what forward's names lead to, and no neighbour of it in a class
        self.modules = dict[int, nn.Module]()
        self.owner: type | None = None  # the class that it stands in
        self.every = set[str]()  # names and words in all functions that were looked at
        self.spoken = set[str]()  # all names in what runs: an object or a class may have been handed to any of it
        self.own: dict[type, set[str]] = {}  # those in the methods of a class that run
        self.values: dict[int, FunctionType] = {}  # functions that stand where forward may have them as things
        self.python: dict[int, ModuleType] = {}  # modules of the user's Python that something holds
        self.families: dict[int, tuple[type, tuple[type, ...]]] = {}
        self.asked: dict[tuple[int, str], int] = {}  # for how many names each of these was
        self.opened: dict[int, Any] = {}  # the classes and functions that what runs meets
        self.left = _MOST  # things that may be looked into for the classes in them, each counted once
        self.counted: dict[int, Any] = {}
        self.done: dict[tuple[int, bool], tuple[Any, set[str]]] = {}  # the names that were looked at in each
        self.todo: list[tuple[Any, bool, type | None]] = []  # what can be called, to be looked at; `runs`, `owner`
        self.unnamed: dict[int, tuple[type, set[str]]] = {}  # the methods of a class that run without being named
        self.looked: dict[tuple[int, ...], Any] = {}  # what was, and what holds others that can be called

    def all(self) -> Reached:
        """What was found, with the attributes of classes and functions that the functions found may assign.

        However many calls away: what forward does there is as much its own.
        """
        while self.todo or self.opens():
            while self.todo:
                thing, self.runs, self.owner = self.todo.pop()
                self.look(thing)
        for cls in self.classes:
            names, table = self.written | self.declared.get(cls, set()), vars(cls)
            if names := names - {n for n in table.keys() & names if hasattr(table[n], "__get__")}:
                self.keep(Root(cls.__name__, cls, (), frozenset(names)))
        named = {at: f for at, f in self.functions.items() if f.__name__ in self.assigning}
        for f in {**named, **self.memories, **self.values}.values():
            self.keep(Root(f"the attributes of {_called(f)}", f.__dict__))
        for module in self.python.values():
            own = vars(module)
            there = {name for name in own if name[:2] != "__"} if len(own) <= _LARGE else ()
            if named_there := frozenset(self.written.union(there)):
                self.keep(Root(f"the attributes of {module.__name__}", own, (), named_there))
        return Reached(
            tuple(self.found.values()),
            tuple(self.memories.values()),
            tuple(self.tensors.values()),
            tuple(self.parts.values()),
            tuple(self.of_threads.values()),
            tuple(self.moving.values()),
            tuple(self.keeping.values()),
        )

    def opens(self) -> bool:
        """Look at what names mean in the classes and functions that what runs meets; whether that led to more that can be called.

        The names in a class's methods may mean other methods of it. What is no method may be read by all that runs.
        """
        self.runs, done = True, 0
        while done < len(self.opened) and not self.todo:
            for thing in [*self.opened.values()][done:]:
                done += 1
                family = self.family(thing)
                spoken = [self.own.get(cls, ()) for cls in family]
                if self.grew(thing, "own", sum(map(len, spoken))):
                    for base in family:
                        self.inside(base, {n for names in spoken for n in names})
        for thing in () if self.todo else [*self.opened.values()]:
            if self.grew(thing, "all", len(self.spoken)):
                self.inside(thing, self.spoken)
        return bool(self.todo) or done < len(self.opened)

    def family(self, cls: Any) -> tuple[type, ...]:
        """A class, its bases and the class that made it, but for torch's and Python's own; none for what is no class."""
        if not is_a(cls, type):
            return ()
        if id(cls) not in self.families:
            found = (*cls.__mro__[:-1], *type(cls).__mro__[:-2])
            self.families[id(cls)] = cls, tuple(base for base in found if not _is_known(base))
        return self.families[id(cls)][1]

    def grew(self, thing: Any, which: str, count: int) -> bool:
        """Whether there are more names than when a thing was last asked for these: names become more, and none is lost."""
        before = self.asked.get((id(thing), which))
        self.asked[id(thing), which] = count
        return before != count

    def inside(self, thing: Any, names: Collection[str], methods: bool = True) -> None:
        """Look at what stands under these names in a class or a function, and at the methods that run without being named."""
        table = own_dict(thing) if is_a(thing, type) else thing.__dict__
        self.read.table(table)
        _, done = self.done.setdefault((id(thing), self.runs), (thing, set()))
        more = table.keys() & names
        if self.runs and is_a(thing, type) and methods:
            if id(thing) not in self.unnamed:
                unasked = {"__init__"} if issubclass(thing, nn.Module) else set()
                found = {n for n in table if n[:2] == "__" and is_a(table[n], FunctionType)}
                self.unnamed[id(thing)] = thing, found - unasked
            more |= self.unnamed[id(thing)][1]
        for name in sorted(more - done):
            inner = table[name]
            if is_method := is_a(inner, FunctionType) or bool(around(inner)):
                if not methods:
                    continue
                self.enter_all(inner, thing if is_a(thing, type) else None)
                if is_a(inner, staticmethod) or not is_a(thing, type):
                    self.of_value(inner)
            done.add(name)
            if not is_method and not name.startswith("__"):
                self.consider(inner, _of_class(thing, name, inner), names if methods else ())

    def meet(self, value: Any, names: Collection[str] = ()) -> None:
        """Look at what these names mean in the classes in a value, and in all that it holds; of objects, in their own."""
        todo, seen, met = [value], set[int](), set[int]()
        while todo:
            thing: Any = todo.pop()
            if is_ours(thing if is_a(thing, type) else type(thing)):
                continue
            applied: Any = _applied(thing)
            thing = applied or thing
            if is_a(thing, type):
                if issubclass(thing, torch.autograd.Function) and thing not in self.declared:
                    self.read.table(own_dict(thing))
                    self.declared[thing] = {n for n in vars(thing) if not n.startswith("__")}
                    for inner in vars(thing).values():
                        self.enter_all(inner)
                if not _is_known(thing):
                    self.classes[thing] = None
                if id(thing) not in met:
                    met.add(id(thing))
                    self.meet_class(thing, names)
            elif type(thing) in LEAVES and not is_a(thing, FunctionType):
                continue
            elif is_a(thing, _CALLED) or is_memory(thing):
                self.of_value(thing)
                self.enter(thing)
            elif is_a(thing, ModuleType):
                self.of_python(thing)
            elif is_a(thing, nn.Module):  # one that stands in no registry of the model's
                for module in thing.modules() if self.runs else ():
                    if id(module) not in self.modules:
                        self.of_module(module)
            elif id(thing) not in seen and not is_opaque(thing) and not is_bare(thing):
                seen.add(id(thing))
                self.read.thing(thing)
                if id(type(thing)) not in met:
                    met.add(id(type(thing)))
                    self.meet_class(type(thing), names)
                if id(thing) not in self.counted and self.left:
                    self.left -= 1
                    self.counted[id(thing)] = thing
                if id(thing) in self.counted:
                    inner = set.__iter__(thing) if is_a(thing, set) else (inner for _, inner in held(thing))
                    todo += (x for x in inner if type(x) not in _HOLDING_NOTHING)

    def meet_class(self, cls: type, names: Collection[str]) -> None:
        """Look at what these names mean in a class, in its bases, and in the class that made it."""
        self.read.thing(cls)
        for base in self.family(cls):
            if self.runs:
                self.classes[base] = None
                self.opened[id(base)] = base
            self.inside(base, names)

    def of_module(self, module: nn.Module) -> None:
        self.modules[id(module)] = module
        self.read.module(module)
        for table in _HOOKS:
            for hook in module.__dict__[table].values():
                self.enter(hook)
        for tensor in (t for t in module._parameters.values() if t is not None):
            self.read.thing(tensor)
            for table in TENSORS_HOOKS:
                for hook in (getattr(tensor, table, None) or {}).values():
                    self.enter(hook)
        kind: Any = type(module)
        for key, value in module.__dict__.items():
            if (function := _applied(value)) is not None:
                self.consider(function, Root(function.__name__, function))
            elif key not in BOOKKEEPING:
                self.runs = False
                self.meet(value, _names_of(kind))
                self.runs = True
                self.meet(value)
        self.of_class(kind)

    def of_value(self, thing: Any) -> None:
        """Take note of a function that something holds: forward may assign attributes of it."""
        function = getattr(thing, "__func__", thing)
        if is_a(function, FunctionType) and not is_known(function.__globals__):
            self.values[id(function)] = function

    def of_python(self, module: ModuleType) -> None:
        """Take note of a Python module that something holds: forward may assign what stands in it, and call that."""
        if not is_known(vars(module)):
            self.read.table(vars(module))
            self.python[id(module)] = module
            if self.runs:
                self.opened[id(module)] = module

    def of_class(self, cls: type) -> None:
        if (id(cls),) in self.seen:
            return
        self.seen.add((id(cls),))
        self.meet_class(type(cls), ())
        for base in cls.__mro__[:-1]:
            if is_torchs_own(base.__module__) or base is nn.Module:
                continue
            self.read.table(own_dict(base))
            self.classes[base] = None
            self.declared[base] = {n for n in vars(base) if not n.startswith("__")}
            self.opened[id(base)] = base
            self.own.setdefault(base, {"forward"})
            for name, thing in list(vars(base).items()):
                if is_a(thing, (staticmethod, classmethod)):
                    thing = thing.__func__
                if is_a(thing, property):
                    thing = thing.fget
                if is_a(thing, cached_property):
                    self.read.thing(thing)
                    thing = thing.func
                if is_a(thing, (FunctionType, partial)) or is_memory(thing):
                    self.todo.append((thing, False, base))
                elif not name.startswith("__"):
                    self.consider(thing, _of_class(base, name, thing))

    def enter(self, thing: Any, owner: type | None = None) -> None:
        """Have a function, or something else that can be called, looked at: of its `owner`, if it stands in a class."""
        self.todo.append((thing, self.runs, owner))

    def is_new(self, thing: Any) -> bool:
        """Whether a thing comes for the first time; a method is made anew whenever it is asked for."""
        method = is_a(thing, MethodType)
        at = (id(thing.__self__), id(thing.__func__)) if method else (id(thing),)
        if (*at, True) in self.looked or (*at, self.runs) in self.looked:
            return False
        self.looked[*at, self.runs] = thing
        return True

    def look(self, thing: Any) -> None:
        """Look at what something that can be called reaches."""
        if not self.is_new(thing):
            return
        if is_a(thing, partial):
            self.read.thing(thing)
            self.enter(thing.func)
            name = f"an argument of {_called(thing.func)}"
            for value in (*thing.args, *thing.keywords.values()):
                self.consider(value, Root(name, value))
        elif is_a(thing, MethodType):
            name = f"the {type(thing.__self__).__name__} of {_called(thing)}"
            self.consider(thing.__self__, Root(name, thing.__self__))
            self.enter(thing.__func__, thing.__self__ if is_a(thing.__self__, type) else type(thing.__self__))
        elif is_memory(thing):
            self.read.thing(thing)
            if not is_known(getattr(thing.__wrapped__, "__globals__", {})):
                self.memories[id(thing)] = thing
                self.opened |= {id(thing): thing} if self.runs else {}
            self.enter(thing.__wrapped__, self.owner)
        elif is_a(thing, FunctionType):
            self.function(thing)
        elif is_a(thing, type):
            self.meet_class(thing, ())
        elif callable(thing) and not is_opaque(thing):
            self.consider(thing, Root(f"the {type(thing).__name__} that is called", thing))
            self.enter(type(thing).__call__)

    def function(self, f: FunctionType) -> None:
        table = f.__globals__
        if id(table) not in self.known:
            self.known[id(table)] = is_known(table), table
        at = (self.runs, id(f.__code__), id(table), *map(id, f.__closure__ or ()))
        self.read.thing(f)
        if at in self.seen:
            return
        self.seen.add(at)
        for cell in f.__closure__ or ():
            self.read.thing(cell)
        if self.known[id(table)][0]:
            for inner in inside(f):  # what a decorator stands around
                self.enter(inner, self.owner)
            around_it: Any = f.__dict__.get("__wrapped__")
            if is_a(around_it, FunctionType) and not is_known(around_it.__globals__):  # as `functools.singledispatch`'s
                self.keep(Root(f"the attributes of {_called(f)}", f.__dict__))
            return
        self.read.table(table)
        self.functions[id(f)] = f
        names, words = names_in(f.__code__), words_in(f.__code__)
        self.every |= names | words
        named = names | words if "getattr" in names else names
        if self.runs:
            self.spoken |= named
            if self.owner is not None:
                self.own.setdefault(self.owner, set()).update(named)
            if f.__dict__:
                self.opened[id(f)] = f
            named = named.union(*(names_in(g.__code__) for g in self.called_by(f, named)))
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            root = Root(f"the variable {name!r} of {_called(f)}", cell, (_CONTENTS,))
            self.consider(root.now(), root, named)
            if name in assigned_in(f.__code__)[0]:
                self.keep(Root(root.name, cell, (), frozenset({"cell_contents"})))
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self.consider(value, Root(f"a default argument of {_called(f)}", value), named)
        if counted := assigned_in(f.__code__)[1]:
            self.keep(Root(f"the globals of {f.__module__}", table, (), counted))
        for name in sorted(all_globals_in(f.__code__) & table.keys()):
            self.consider(table[name], Root(f"the global {name!r}", table, (name,)), named)
        for name in imported_in(f.__code__):
            module = self.read.imported(absolute(name, table))
            self.consider(module, Root(name, module), named)
        self.assigns(f, names)

    def called_by(self, f: FunctionType, names: Collection[str]) -> list[FunctionType]:
        """The functions that one has these names for, and that it may hand a class or an object to."""
        for cls in (family := self.family(self.owner)):
            self.read.thing(cls)
            self.read.table(own_dict(cls))
        own = [vars(cls)[name] for cls in family for name in vars(cls).keys() & names]
        found = [*inside(f), *map(f.__globals__.get, f.__globals__.keys() & names), *own]
        found += [inner for thing in own for inner in around(thing)]
        called = [thing for thing in found if is_a(thing, FunctionType) and not is_known(thing.__globals__)]
        for thing in called:
            self.read.thing(thing)
        return called

    def assigns(self, f: FunctionType, names: frozenset[str]) -> None:
        """Take note of the attributes that a function with these names assigns, if they may be those of a class or a function."""
        written = written_in(f.__code__)
        if not written:
            return
        variables = f.__code__.co_freevars
        cells = (follow(cell, (_CONTENTS,)) for cell in f.__closure__ or () if cell != CellType())
        attributed = any(is_a(thing, _ATTRIBUTED) for thing in (*map(f.__globals__.get, names), *cells))
        means = not {*_MEANING_A_CLASS}.isdisjoint({*names, *f.__code__.co_varnames, *variables})
        if means or attributed:
            self.assigning |= {*names, *variables}
        if means or attributed or self.runs:
            self.written |= written

    def consider(self, value: Any, root: Root, names: Collection[str] = (), deep: int = 0) -> None:
        """Keep a root, if something can be put into what it holds; go on from there if it can be called."""
        value = _applied(value) or value
        if type(value) in LEAVES:  # as most are: nothing can be put into these
            if is_a(value, torch.Tensor):
                self.tensors[id(value)] = value
            elif type(value) not in _HOLDING_NOTHING:
                self.meet(value, names)
            return
        if is_a(value, _OF_A_THREAD):
            self.of_threads.setdefault((id(root.thing), root.steps), root)
        several = tuple.__getitem__(value, slice(None)) if is_a(value, tuple) else (value,)
        if any(is_raw(v) or is_a(v, memoryview) or is_iterator(v) or bound_to(v) is not MISSING for v in several):
            self.moving.setdefault((id(root.thing), root.steps), root)
        elif any(map(keeps_state, several)):
            self.keeping.setdefault((id(root.thing), root.steps), root)
        self.tensors.update((id(t), t) for t in several if is_a(t, torch.Tensor))
        if is_a(value, nn.Module):
            self.parts.update((id(t), t) for t in (*value.parameters(), *value.buffers()))
            for module in value.modules():
                self.read.module(module)
        self.meet(value, names)
        if is_a(value, ModuleType) and not is_known(vars(value)):
            self.read.table(vars(value))
            for name in sorted(vars(value).keys() & names) if deep < _DEEP else ():
                at = Root(f"{value.__name__}.{name}", vars(value), (name,))
                self.consider(vars(value)[name], at, names if is_a(at.now(), ModuleType) else (), deep + 1)
        elif value is not MISSING and not is_opaque(value) and not is_bare(value):
            self.keep(root)

    def enter_all(self, thing: Any, owner: type | None = None) -> None:
        """The same of what stands in a class, be it a function, a property or a static method."""
        if is_a(thing, cached_property):
            self.read.thing(thing)
        for inner in [thing] if is_a(thing, (FunctionType, partial)) or is_memory(thing) else around(thing):
            self.enter(inner, owner)

    def keep(self, root: Root) -> None:
        if not root.names and not kinds_of(root.now()):
            return
        key = id(root.thing), root.steps, bool(root.names)
        if key in self.found:
            self.found[key] = replace(self.found[key], names=self.found[key].names | root.names)
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
    own = (base for base in cls.__mro__[:-1] if not is_torchs_own(base.__module__))
    functions = (f for base in own for thing in vars(base).values() for f in (thing, *around(thing)))
    return frozenset(name for f in functions if is_a(f, FunctionType) for name in names_in(f.__code__))


def _is_known(cls: type) -> bool:
    """Whether a class is torch's or Python's own."""
    return is_known(getattr(sys.modules.get(cls.__module__), "__dict__", {"__name__": ""}))


def _of_class(cls: Any, name: str, thing: Any) -> Root:
    """What stands in a class, or a function, under a name: by the name, so that another that is put there is found."""
    table, what = own_dict(cls) if is_a(cls, type) else cls.__dict__, f"{cls.__name__}.{name}"
    return Root(what, table, (name,)) if table.get(name) is thing else Root(what, thing)


def _called(f: Any) -> str:
    return str(getattr(f, "__qualname__", None) or getattr(f, "__name__", type(f).__name__)).replace("<locals>.", "")
