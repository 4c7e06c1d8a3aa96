"""What Python keeps behind a module's attribute: lists, dicts, objects and arrays, and the steps that lead into them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from operator import getitem
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import torch
from torch import nn

_PLAIN = (
    torch.Tensor,
    nn.Module,
    type,
    FunctionType,
    BuiltinFunctionType,
    WrapperDescriptorType,
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
MISSING = object()
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


def lasts(value: Any) -> bool:
    """Whether a value is plain and can't change by itself, so that an equal one would do as well."""
    return isinstance(value, SIMPLE) or (isinstance(value, tuple) and all(map(lasts, value)))


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array, asked without numpy."""
    return type(value).__name__ == "ndarray" and hasattr(value, "tobytes")


def is_opaque(value: Any) -> bool:
    """Whether nothing is looked for inside: plain values, tensors, modules, classes, functions, and what torch keeps."""
    return (
        type(value) in LEAVES
        or isinstance(value, _PLAIN)
        or (type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, (dict, list, tuple)))
    )


def slots_of(value: Any) -> list[str]:
    """The names of an object's slots, those without a value too."""
    found = []
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            found.append(f"_{cls.__name__.lstrip('_')}{name}" if hidden else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def held(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object holds one step away, as (step, thing); nothing for what `is_opaque`, for sets and arrays."""
    if is_opaque(value) or is_array(value):
        return
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(list(value))
    elif isinstance(value, MethodType):
        yield Attribute("__self__"), value.__self__
        return
    elif isinstance(value, partial):
        yield from ((Attribute(name), getattr(value, name)) for name in ("func", "args", "keywords"))
    else:
        for name in slots_of(value):
            thing = getattr(value, name, MISSING)
            if thing is not MISSING:
                yield Attribute(name), thing
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield from ((Attribute(name), thing) for name, thing in list(own.items()) if isinstance(name, str))


def is_followed(keys: tuple[Any, ...]) -> bool:
    """Whether a plan reads a tensor that stands at these keys anew at each call, and does not keep that of its capture."""
    return len(keys) <= 1 + DEPTH and all(isinstance(key, (str, int)) for key in keys)


def place(value: Any, step: Any) -> Any:
    """Where `step` stands in an object, as something to be asked by `[step]`."""
    if not isinstance(step, Attribute):
        return value
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) and step in own else Slots(value)


def follow(value: Any, steps: tuple[Any, ...]) -> Any:
    """What the steps lead to; KeyError, IndexError or AttributeError where they lead nowhere."""
    for step in steps:
        value = getitem(place(value, step), step)
        if value is MISSING:
            raise AttributeError(step)
    return value


def strays(modules: Mapping[str, nn.Module], passed_over: frozenset[str]) -> dict[str, nn.Module]:
    """The modules that stand in no registry, but in what attributes of these hold: `layers[0]`, by how one gets there.

    The attributes `passed_over` are not looked into.
    """
    found: dict[str, nn.Module] = {}
    seen, known = set[int](), {id(m) for m in modules.values()}
    todo: list[tuple[str, Any]] = []

    def look(path: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            for name, module in value.named_modules(prefix=path):
                if id(module) not in known:
                    known.add(id(module))
                    found[name] = module
                    enter(name, module)
        elif type(value) not in LEAVES and id(value) not in seen and not is_opaque(value):
            seen.add(id(value))
            todo.append((path, value))

    def enter(path: str, module: nn.Module) -> None:
        for name, value in list(module.__dict__.items()):
            if type(value) not in LEAVES and name not in passed_over:
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
