"""What Python keeps behind a module's attribute: lists, dicts, objects and arrays, and the steps that lead into them."""

from __future__ import annotations

import gc
import os
import random
import sys
import sysconfig
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache, partial
from itertools import product
from logging import Logger
from operator import getitem
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

_PLAIN = (
    torch.Tensor,
    nn.Module,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    torch.dtype,
    torch.device,
    str,
    bytes,
    int,
    float,
    bool,
)
LEAVES = frozenset(
    {torch.Tensor, nn.Parameter, str, bytes, int, float, bool, type(None), type, FunctionType, torch.dtype}
)
_OF_MEMBERS = frozenset(
    {"_value_", "_name_", "__objclass__", "_sort_order_", "_value_repr_", "_hashable_values_"}
)  # of an Enum
MISSING = object()
ANY = "*"  # among names: attributes may have been read by others, too
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, partial)
_WITHOUT_ATTRIBUTES = frozenset(
    {dict, defaultdict, list, tuple, set, frozenset, deque}
)  # an `OrderedDict` may have some
OPEN = {
    ("types", "SimpleNamespace"),
    ("argparse", "Namespace"),
    ("collections", "UserDict"),
    ("collections", "UserList"),
}
OPEN |= {("collections", "ChainMap"), ("logging", "LoggerAdapter")}
PYTHONS_FILES = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_INSTALLED = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib"))
_PLAINEST = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
SIMPLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)  # what an equal value may stand for


BOOKKEEPING = frozenset(
    "_parameters _buffers _modules _non_persistent_buffers_set _backward_pre_hooks _backward_hooks _forward_hooks "
    "_forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks _forward_pre_hooks_with_kwargs "
    "_state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks "
    "_is_full_backward_hook _compiled_call_impl __dict__ __class__".split()
)
DEPTH = 4  # so many steps into what an attribute holds, a tensor is followed


class Attribute(str):
    """A step to an attribute of an object; any other step is a key or an index."""

    __slots__ = ()


class Slots:
    """An object whose attributes are read as items, wherever it keeps them: in slots, too. `MISSING` stands for none."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getitem__(self, name: str) -> Any:
        return getattr(self.thing, name, MISSING)

    def __setitem__(self, name: str, value: Any) -> None:
        delattr(self.thing, name) if value is MISSING else setattr(self.thing, name, value)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a value is of a class, going by its class and not by what it says of itself: a dead weak proxy can't be asked."""
    return issubclass(type(value), kinds)


def lasts(value: Any) -> bool:
    """Whether a value is plain and can't change by itself, so that an equal one would do as well: not where it has attributes."""
    if type(value) in _PLAINEST:
        return True
    plain = is_a(value, SIMPLE) or (is_a(value, tuple) and all(map(lasts, tuple.__iter__(value))))
    return plain and not has_fields(value)


def is_fixed(value: Any) -> bool:
    """Whether a value lasts, and can come to have no attributes either."""
    return type(value) in _PLAINEST or (lasts(value) and not may_get_fields(value))


def may_get_fields(value: Any) -> bool:
    """Whether a plain value, or one in a plain container, is of a class whose objects can have attributes, now or later."""
    kind: Any = type(value)
    if kind in _PLAINEST:
        return False
    if may_have_fields(kind):
        return True
    inner = (*value.keys(), *value.values()) if is_a(value, dict) else value
    return is_a(value, (dict, tuple, list, set, frozenset)) and any(map(may_get_fields, inner))


def has_fields(value: Any) -> bool:
    """Whether a number, a text or a tuple of a class of its own has attributes; of an enumeration, more than Python's."""
    kind: Any = type(value)
    if not may_have_fields(kind):
        return False
    own = own_of(value)
    if own and (not issubclass(kind, Enum) or not _OF_MEMBERS.issuperset(own)):
        return True
    return any(slot_of(value, n) is not MISSING for n in slots_of(value))


@lru_cache(maxsize=4096)
def may_have_fields(kind: Any) -> bool:
    """Whether numbers, texts or tuples of this class can have attributes of their own."""
    if not issubclass(kind, (*SIMPLE, tuple)):
        return False
    return kind.__dictoffset__ != 0 or any(vars(c).get("__slots__") for c in kind.__mro__)


def is_memory(value: Any) -> bool:
    """Whether a function keeps its results in C: what `functools.lru_cache` and `cache` make."""
    return type(value).__name__ == "_lru_cache_wrapper"


def entries_of(memory: Any) -> list[tuple[Any, Any]]:
    """What such a function has kept, as the garbage collector knows it: (what it was asked, result)."""
    found = gc.get_referents(memory)
    table = next((t for t in found if type(t) is dict and t is not own_of(memory)), {})
    if memory.cache_info().maxsize is None:
        return [*table.items()]
    links = (at for at, thing in enumerate(found) if is_a(thing, type) and thing.__name__ == "_lru_list_elem")
    return [(found[at - 2], found[at - 1]) for at in links if at > 2 and found[at - 2] in table]


def entries_beside(memory: Any, known: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Those of them that are not among those that are `known`."""
    before = {id(key): result for key, result in known}
    return [(key, result) for key, result in entries_of(memory) if before.get(id(key), MISSING) is not result]


_IN_C = (BuiltinFunctionType, MethodWrapperType)


def bound_to(value: Any) -> Any:
    """What a method in C is bound to, such as `table.get`; `MISSING` for all else.

    A function in C is one of a module or a class. That a method of Python's or numpy's one generator for all is there changes
    nothing, and a draw is refused.
    """
    if type(value) not in _IN_C:
        return MISSING
    owner = value.__self__
    function = owner is None or is_a(owner, (type, ModuleType)) or type(owner).__name__ == "PyCapsule"
    return MISSING if function or draws_for_all(value) else owner


def draws_for_all(method: Any) -> bool:
    """Whether a method is of Python's or numpy's one generator for all, and is none that tells where that stands."""
    numbers = sys.modules.get("numpy.random.mtrand")
    generators = getattr(random, "_inst", None), getattr(numbers, "_rand", None)
    return any(method.__self__ is g for g in generators) and method.__name__ not in ("getstate", "get_state")


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array, asked without numpy."""
    array: type | None = getattr(sys.modules.get("numpy"), "ndarray", None)
    return array is not None and issubclass(type(value), array)


def is_bare(value: Any) -> bool:
    """Whether a value is a numpy array that leads to nothing else: it holds numbers, and can have no attributes."""
    return is_array(value) and not value.dtype.hasobject and own_of(value) is None and not slots_of(value)


def is_raw(value: Any) -> bool:
    """Whether a value is data that are written in place: an array of numpy's or of Python's own, or a bytearray."""
    return is_a(value, (bytearray, array)) or is_array(value)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's own, as `iter` and `itertools` make: one that was asked stands elsewhere."""
    return type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__next__")


def is_opaque(value: Any) -> bool:
    """Whether nothing is looked for inside: plain values, tensors, modules, classes, functions and bound methods, and what torch or
    Python's own library made, but for containers, namespaces and partials.
    """
    kind: Any = type(value)
    if kind in LEAVES:
        return True
    return bound_to(value) is MISSING if kind in _IN_C else _is_opaque(kind)


_LIKE_USERS = "torch.utils.data."  # datasets, samplers and loaders: plain Python that steers forward by what it holds


@lru_cache(maxsize=4096)
def is_torchs_own(name: str) -> bool:
    """Whether a module of this name is torch's, and none of those that are read as a user's are."""
    return name.partition(".")[0] == "torch" and not name.startswith(_LIKE_USERS)


_OURS = ("ariadne.runtime", "ariadne.stopped", "ariadne.pipeline", "ariadne.remote")


def is_ours(kind: type) -> bool:
    """Whether it is a class of a split's: one that forward calls looks after its own."""
    return kind.__module__.startswith(_OURS)


@lru_cache(maxsize=4096)
def _is_opaque(kind: Any) -> bool:
    if may_have_fields(kind):
        return False
    if issubclass(kind, threading.local):  # what it holds is another thing in each thread
        return True
    if issubclass(kind, _PLAIN) or (is_torchs_own(kind.__module__) and not issubclass(kind, _CONTAINERS)):
        return True
    if is_ours(kind):
        return True
    return is_pythons_own(kind) and not issubclass(kind, _CONTAINERS) and not is_open(kind)


def is_open(kind: type) -> bool:
    """Whether a class of Python's own is one of those whose attributes are looked into as a user's are."""
    return (kind.__module__, kind.__name__) in OPEN


def is_pythons_own(kind: type) -> bool:
    """Whether a class is one of Python's own library."""
    known = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return known and is_pythons(sys.modules.get(kind.__module__))


def is_pythons(module: ModuleType | None) -> bool:
    """Whether a module that has the name of one of Python's own is that one, by the place of its file."""
    file = str(getattr(module, "__file__", None) or "")
    return not file or (file.startswith(PYTHONS_FILES) and not file.startswith(_INSTALLED))


def own_of(value: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, if it has one that can be had without running its code."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # whatever a class has put in its place: then it keeps to itself
        return None
    return own if isinstance(own, dict) else None


def slot_of(value: Any, name: str) -> Any:
    """What stands in an object's slot; `MISSING` where nothing does."""
    for cls in type(value).__mro__:
        if isinstance(cls.__dict__.get(name), MemberDescriptorType):
            try:
                return cls.__dict__[name].__get__(value)
            except AttributeError:
                return MISSING
    return MISSING


def variables(thing: Any, names: Iterable[str]) -> dict[str, Any]:
    """What stands under these names among globals, in a class itself, or in a cell; where nothing does, the name is left out."""
    if is_a(thing, dict) and not isinstance(names, frozenset):
        return {n: thing[n] for n in names if n in thing}
    if is_a(thing, (dict, type)):  # of the thousands that functions may assign, few stand there
        table = vars(thing) if is_a(thing, type) else thing
        return {n: table[n] for n in sorted(frozenset(names).intersection(table))}
    try:
        return {"cell_contents": thing.cell_contents}
    except ValueError:  # assigned later
        return {}


def kind_of(value: Any) -> str:
    """dict, list, set or object; nothing for what holds nothing that can be put there."""
    for kind, name in ((dict, "dict"), ((list, deque), "list"), (set, "set"), ((tuple, frozenset, partial), "")):
        if is_a(value, kind):
            return name
    return "object" if own_of(value) is not None or slots_of(value) else ""


def kinds_of(value: Any) -> tuple[str, ...]:
    """The same, and object, too, for what can have attributes beside what it holds: a list of a class of its own, a partial."""
    kind = kind_of(value)
    if type(value) in _WITHOUT_ATTRIBUTES:
        return (kind,) if kind else ()
    beside = kind != "object" and (own_of(value) is not None or bool(slots_of(value)))
    return (*([kind] if kind else []), *(["object"] if beside else []))


def slots_of(value: Any) -> list[str]:
    """The names of an object's slots, those without a value too."""
    found = []
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            found.append(f"_{cls.__name__.lstrip('_')}{name}" if hidden else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def held(value: Any) -> list[tuple[Any, Any]]:
    """What an object holds one step away, as (step, thing), read without running its code.

    Nothing for what `is_opaque`; of sets, and of arrays that hold numbers, their attributes.
    """
    kind = type(value)
    if is_opaque(value):
        return []
    found: list[tuple[Any, Any]] = []
    if kind in _IN_C:
        return [(Attribute("__self__"), bound_to(value))]
    if is_array(value):
        if value.dtype.kind == "O":
            found += enumerate(value) if value.ndim == 1 else ((at, value[at]) for at in _indices(value))
    elif issubclass(kind, dict):
        found += dict.items(value)
        if issubclass(kind, defaultdict):
            found.append((Attribute("default_factory"), value.default_factory))
    elif issubclass(kind, list):
        found += enumerate(list.__iter__(value))
    elif issubclass(kind, tuple):
        found += enumerate(tuple.__iter__(value))
    elif issubclass(kind, deque):
        found += enumerate(deque.__iter__(value))
    elif issubclass(kind, partial):
        found += [
            (Attribute("func"), value.func),
            (Attribute("args"), value.args),
            (Attribute("keywords"), value.keywords),
        ]
    if kind not in _WITHOUT_ATTRIBUTES:
        slots = ((Attribute(name), slot_of(value, name)) for name in slots_of(value))
        found += [(name, thing) for name, thing in slots if thing is not MISSING]
    return found + [(Attribute(name), thing) for name, thing in (own_of(value) or {}).items() if isinstance(name, str)]


def _indices(array: Any) -> Iterable[tuple[int, ...]]:
    """Where the things stand in an array of objects."""
    return product(*map(range, array.shape))


def is_followed(keys: tuple[Any, ...]) -> bool:
    """Whether a plan reads a tensor that stands at these keys anew at each call, and does not keep that of its capture."""
    return len(keys) <= 1 + DEPTH and all(isinstance(key, (str, int)) for key in keys)


def place(value: Any, step: Any) -> Any:
    """Where `step` stands in an object, as something to be asked by `[step]`."""
    if not isinstance(step, Attribute):
        return value
    own = own_of(value)
    return own if own is not None and step in own else Slots(value)


def follow(value: Any, steps: tuple[Any, ...]) -> Any:
    """What the steps lead to; KeyError, IndexError or AttributeError where they lead nowhere."""
    for step in steps:
        value = getitem(place(value, step), step)
        if value is MISSING:
            raise AttributeError(step)
    return value


def strays(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that stand in no registry, but in what attributes of these hold: `layers[0]`, by how one gets there.

    What torch itself keeps in a module is not looked into.
    """
    found: dict[str, nn.Module] = {}
    seen, known = set[int](), {id(m) for m in modules.values()}
    todo: list[tuple[str, Any]] = []

    def look(path: str, value: Any) -> None:
        if type(value) is MethodType:
            value = value.__self__
            path += ".__self__"
        if issubclass(type(value), nn.Module):
            for name, module in value.named_modules(prefix=path):
                if id(module) not in known:
                    known.add(id(module))
                    found[name] = module
                    enter(name, module)
        elif type(value) not in LEAVES and id(value) not in seen and not is_opaque(value):
            seen.add(id(value))
            todo.append((path, value))
            if issubclass(type(value), (set, frozenset)):
                for thing in (set if is_a(value, set) else frozenset).__iter__(value):
                    if issubclass(type(thing), nn.Module):
                        look(f"{path}{{…}}", thing)

    def enter(path: str, module: nn.Module) -> None:
        for name, value in list(module.__dict__.items()):
            if type(value) not in LEAVES and name not in BOOKKEEPING:
                look(f"{path}.{name}".removeprefix("."), value)

    for path, module in modules.items():
        enter(path, module)
    while todo:
        path, value = todo.pop()
        for step, thing in held(value):
            if type(thing) not in LEAVES:
                look(f"{path}{shown(step)}", thing)
    return found


def shown(step: Any) -> str:
    """A step as Python writes it: `.scales` or `[0]`."""
    return f".{step}" if isinstance(step, Attribute) else f"[{step!r}]"


def simple(value: Any, depth: int = 8) -> bool:
    """Whether a value is a plain constant that a guard can compare: numbers, strings, and short containers of them.

    A container of a class of its own may do what it likes when it is copied, and one that is `depth` deep may hold itself.
    """
    if type(value) in _PLAINEST:
        return True
    if is_a(value, SIMPLE):
        return not has_fields(value)
    if is_a(value, tuple):
        if has_fields(value):
            return False
        value = tuple.__getitem__(value, slice(None))  # one of a class of its own may tell other things
    if type(value) in (tuple, list, set, frozenset):
        return depth > 0 and len(value) <= 64 and all(type(v) in _PLAINEST or simple(v, depth - 1) for v in value)
    if type(value) in (dict, OrderedDict):
        return depth > 0 and len(value) <= 64 and all(simple(k) and simple(v, depth - 1) for k, v in value.items())
    return False


_KEEPING_NOTHING = (
    *SIMPLE,
    bytes,
    torch.Tensor,
    nn.Module,
    type,
    FunctionType,
    ModuleType,
    Logger,
    property,
    staticmethod,
    classmethod,
)


def keeps_state(value: Any) -> bool:
    """Whether a thing that holds nothing by name may keep state to itself, such as an event, a random generator or text in memory.

    None whose class is torch's does, but for its random generators.
    """
    if type(value) in LEAVES or value is MISSING or is_a(value, _KEEPING_NOTHING) or is_memory(value):
        return False
    if is_torchs_own(type(value).__module__):
        return is_a(value, torch.Generator)
    return is_opaque(value) or not kind_of(value)
