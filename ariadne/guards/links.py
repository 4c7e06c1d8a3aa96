"""Links: what one step from a value leads to, an attribute or an item, told without running the model's code."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from ariadne.guards.attributes import (
    MISSING,
    Slots,
    is_a,
    is_pythons,
    is_pythons_own,
    is_torchs_own,
    own_of,
    slot_of,
    slots_of,
)
from ariadne.guards.classes import Lookup, Owned, changeable, own_dict
from ariadne.guards.functions import reached
from ariadne.guards.outside import Outside
from ariadne.guards.readers import READS, tells

_PACKAGES = {"torch", "ariadne", "sympy", "numpy", "builtins"}
_CLASS = vars(object)["__class__"]
_TABLE: Any = vars(type)["__dict__"].__get__  # of a class, which may have something else by that name


def is_known(table: Mapping[str, Any]) -> bool:
    """Whether a module's globals are those of torch or of Python itself, by name and, where names are common, by place."""
    name = str(table.get("__name__"))
    top = name.partition(".")[0]
    if top in _PACKAGES:
        return top != "torch" or is_torchs_own(name)
    if top not in sys.stdlib_module_names:
        return False
    module = sys.modules.get(name)
    return is_pythons(module) if module is not None and vars(module) is table else "__file__" not in table


def is_torchs_import(frame: FrameType) -> bool:
    """Whether what begins to run is a module that torch imports where it needs it first: no later call runs it again."""
    functions, caller = set(), frame.f_back
    while caller is not None and str(caller.f_globals.get("__name__")).startswith("importlib."):
        functions.add(caller.f_code.co_name)
        caller = caller.f_back
    name = "" if caller is None else str(caller.f_globals.get("__name__"))
    return "_load_unlocked" in functions and name.partition(".")[0] == "torch"


def absolute(name: str, table: Mapping[str, Any]) -> str:
    """The name of a module as `sys.modules` has it, from the place of the import."""
    try:
        return importlib.util.resolve_name(name, str(table.get("__package__") or table.get("__name__")))
    except ImportError:
        return name


def kind_for(first: Any) -> type | None:
    """The class whose methods a function may be one of, by its first argument."""
    kind = first if is_a(first, type) else type(first)
    return kind if next(changeable(kind), None) is not None else None


def method_of(kind: type, code: CodeType) -> Iterator[Outside]:
    """Where in a class the function with this code stands, and that nothing comes before it."""
    name = code.co_name
    for cls in changeable(kind):
        thing = vars(cls).get(name, MISSING)
        if thing is not MISSING and any(f.__code__ is code for f in reached([thing])):
            yield Outside(own_dict(cls), name, thing, f"{cls.__qualname__}.{name}")
            if (lookup := Lookup(kind))[name] is thing:
                yield Outside(lookup, name, thing, f"{kind.__qualname__}.{name}")
            return


def static(value: Any, key: str, default: Any = MISSING) -> Any:
    """As `inspect.getattr_static`, which takes five times as long where an object or its class alone has the attribute."""
    kind = type(value)
    found: Any = MISSING
    hidden = False
    for cls in kind.__mro__:
        if type(cls) is not type or cls is type:
            return inspect.getattr_static(value, key, default)
        table = _TABLE(cls)
        if "__dict__" in table:
            its_own = table["__dict__"]
            hidden = hidden or type(its_own) is not GetSetDescriptorType or its_own.__objclass__ is not cls
        if found is MISSING and key in table:
            found = table[key]
    if hidden:
        return inspect.getattr_static(value, key, default)
    try:
        own: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = ()
    there = dict.get(own, key, MISSING) if own else MISSING
    if there is not MISSING and found is not MISSING:
        return inspect.getattr_static(value, key, default)
    found = there if found is MISSING else found
    return default if found is MISSING else found


def link_of(value: Any, kind: str, key: Any, name: str) -> Outside | None:
    """What one link of a chain leads to; None where that can't be told without running the model's code."""
    if kind == "item":
        # To ask a defaultdict would put something there.
        if not is_a(value, (dict, list, tuple)) or (is_a(value, dict) and key not in value):
            return None
        found = Outside(value, key, MISSING, "").now()
        return None if found is MISSING else Outside(value, key, found, f"{name}[{key!r}]")
    if is_a(value, torch.Tensor):
        own = own_of(value)
        if own is None or hasattr(torch.Tensor, key):
            return None
        return Outside(own, key, own.get(key, MISSING), f"{name}.{key}")
    if is_torchs(value):
        there = (
            vars(value).get(key, MISSING) if is_a(value, ModuleType) and _home(value).startswith("torch") else MISSING
        )
        return Outside(vars(value), key, there, f"{name}.{key}") if callable(there) or is_a(there, ModuleType) else None
    there = static(value, key, MISSING)
    answers = not is_a(value, (type, torch.nn.Module)) and any(READS in vars(c) for c in changeable(type(value)))
    if answers and there is not MISSING and not tells(type(value)):
        return None  # it may give anything
    if there is _CLASS:
        return Outside(Slots(value), key, type(value), f"the class of {name}")
    if there is MISSING and is_a(value, dict) and key in value and getattr(value, key, MISSING) is value[key]:
        return Outside(value, key, value[key], f"{name}.{key}")  # a dict whose keys can be read as attributes
    if is_a(there, MemberDescriptorType):
        there = getattr(value, key, MISSING)
    table = vars(value) if is_a(value, ModuleType) else Slots(value)
    if is_a(value, type) and there is not MISSING and Lookup(value)[key] is MISSING:
        table = Lookup(type(value))  # a class has it from its own class
    if there is MISSING:
        finds_more = hasattr(type(value), "__getattr__") or answers
        own = own_of(value)
        if is_a(value, type) and type(value) is type:
            return Outside(Lookup(value), key, MISSING, f"{name}.{key}")
        if finds_more or own is None:
            has_slot = not finds_more and key in slots_of(value)
            return Outside(Slots(value), key, MISSING, f"{name}.{key}") if has_slot else None
        return Outside(own if is_a(value, ModuleType) else Owned(value, own), key, MISSING, f"{name}.{key}")
    # What stands in an object's or a module's own dict is given as it is, functions too.
    binds = hasattr(type(there), "__get__") and (
        is_a(value, type) or (own_of(value) or {}).get(key, MISSING) is not there
    )
    return None if binds else Outside(table, key, there, f"{name}.{key}")


def descriptor_of(value: Any, kind: str, key: Any) -> Any:
    """The object in a class that an attribute is asked of, if it is one of the user's own; else `MISSING`."""
    if kind == "item" or is_torchs(value):
        return MISSING
    there = static(value, key, MISSING)
    if there is MISSING or is_pythons_own(type(there)) or not hasattr(type(there), "__get__"):
        return MISSING
    return there


def found_by_class(value: Any, key: str, name: str) -> Iterator[Outside]:
    """What in a class decides how an attribute of a thing is found, where its class has a say: what stands there for it, unbound;
    or, where a `__getattr__` answers, that it stands nowhere."""
    if is_a(value, ModuleType):
        return
    own = own_of(value)
    found = Lookup(value if is_a(value, type) else type(value))
    told = f"{found.thing.__qualname__}.{key}"
    if (there := found[key]) is not MISSING:
        yield Outside(found, key, there, told)
        is_method = callable(there) or is_a(there, classmethod)  # a cached property comes to stand in the object
        if is_method and not is_a(value, type) and own is not None and key not in own:
            yield Outside(Owned(value, own), key, there, f"{name}.{key}", value)
    elif is_a(value, type):
        yield Outside(found, key, MISSING, told)
        if (there := (above := Lookup(type(value)))[key]) is not MISSING:
            yield Outside(above, key, there, f"{type(value).__qualname__}.{key}")
    elif own is not None and key not in own and static(value, key, MISSING) is MISSING:
        yield Outside(Owned(value, own), key, MISSING, f"{name}.{key}", value)


def hiding(cls: type, link: Outside) -> Iterator[Outside]:
    """That nothing in a class hides what it has from its own class."""
    if is_a(link.table, Lookup) and link.table.thing is not cls:
        yield Outside(Lookup(cls), link.key, MISSING, f"{cls.__qualname__}.{link.key}")


def has_itself(value: Any, kind: str, key: Any) -> bool:
    """Whether an object has an attribute, or a container an item, of its own and not from its class."""
    if kind == "item" or key in (own_of(value) or ()):
        return True
    there = static(value, key, MISSING)
    if there is MISSING and is_a(value, dict):  # whose keys can be read as attributes
        return key in value
    return isinstance(there, MemberDescriptorType) and slot_of(value, str(key)) is not MISSING


def counts_as_torchs(value: Any) -> bool:
    """Whether a class is torch's or Python's own."""
    module = sys.modules.get(_home(value))
    return module is not None and is_known(vars(module))


def is_torchs(value: Any) -> bool:
    """Whether a global is a tensor, a weak proxy, or a module or class of torch or of Python itself."""
    if is_a(value, (torch.Tensor, *weakref.ProxyTypes)):
        return True
    if not is_a(value, (ModuleType, type)):
        return False
    module = sys.modules.get(_home(value))
    return module is not None and is_known(vars(module))


def _home(value: Any) -> str:
    """The name of a module, or of the one that a class is from."""
    return str(value.__name__ if is_a(value, ModuleType) else value.__module__)
