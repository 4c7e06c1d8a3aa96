"""What Python keeps: attributes of modules and of what they hold, and generators, as they are at one moment."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_TABLES = ("_parameters", "_buffers")
_SKIPPED = frozenset({"_modules", "_call_impl", "_compiled_call_impl", *_TABLES})
_REGISTRIES = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict)) - _SKIPPED
MISSING = object()
Place = tuple[str, str, str]  # path of a module, "__dict__" or "_buffers", name


def generators() -> dict[str, Any]:
    """How the generators of Python and numpy stand, as plain data."""
    found: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, tuple(keys.tolist()), *rest)
    return found


def set_generators(states: dict[str, Any]) -> None:
    """Have them stand so."""
    for name, state in states.items():
        if name == "random":
            random.setstate(state)
        else:
            sys.modules["numpy"].random.set_state(state)


class PythonState:
    """The attributes of a model's modules, and the containers and objects that these hold, at one moment.

    `changes` tells what is otherwise now; `undoing` keeps what it takes to put that back.
    """

    def __init__(self, model: nn.Module) -> None:
        self.attributes: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []  # path, table, it, what was in it
        self.held: list[tuple[str, Any, Any]] = []  # where, a container or an object's __dict__, what was in it
        self.empty: list[Any] = []  # registries of hooks in which nothing is: most of all that a model holds
        self.generators = generators()
        self.opaque: list[tuple[str, Any, Any]] = []  # where, a thing with neither items nor a __dict__, what it was
        seen: set[int] = set()
        for path, module in model.named_modules():
            self.attributes.append((path, "__dict__", module.__dict__, dict(module.__dict__)))
            for table in _TABLES:
                found = module.__dict__[table]
                if found:
                    self.attributes.append((path, table, found, dict(found)))
            for name, value in module.__dict__.items():
                if name in _REGISTRIES and not value:
                    self.empty.append(value)
                elif name not in _SKIPPED:
                    self._note(f"{path}.{name}", value, seen)

    def _note(self, where: str, value: Any, seen: set[int]) -> None:
        kind = type(value)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)):
            return
        if kind in _PLAIN or id(value) in seen or isinstance(value, (torch.Tensor, nn.Module, type)):
            return
        seen.add(id(value))
        if isinstance(value, (list, deque)):
            self.held.append((where, value, list(value)))
            children = list(value)
        elif isinstance(value, dict):
            self.held.append((where, value, dict(value)))
            children = list(value.values())
        elif kind is set:
            self.held.append((where, value, set(value)))
            return
        elif kind is tuple:
            children = list(value)
        elif isinstance(value, random.Random):
            self.held.append((where, value, value.getstate()))
            return
        elif isinstance(vars_of := getattr(value, "__dict__", None), dict):
            self.held.append((where, vars_of, dict(vars_of)))
            children = list(vars_of.values())
        else:
            if (told := _opaque(value)) is not None:
                self.opaque.append((where, value, told))
            return
        for child in children:
            self._note(where, child, seen)

    def changes(self) -> Iterator[tuple[Place, dict[str, Any], Any, Any]]:
        """The attributes that stand otherwise: where, in what dict, what stood there and what does; `MISSING` for nothing."""
        for path, table, now, was in self.attributes:
            if len(now) == len(was) and all(now.get(k, MISSING) is v for k, v in was.items()):
                continue
            for name in [*was, *(k for k in now if k not in was)]:
                before, after = was.get(name, MISSING), now.get(name, MISSING)
                if before is not after and name not in _SKIPPED:
                    yield (path, table, name), now, before, after

    def changed_inside(self) -> str | None:
        """Where a container, an object or a generator that an attribute holds is otherwise now; None where none is."""
        if any(self.empty):
            return "a registry of hooks"
        strange = next((where for where, thing, was in self.opaque if _opaque(thing) != was), None)
        if strange is not None:
            return strange
        return next((where for where, thing, was in self.held if not _same(thing, was)), None)

    def undoing(self) -> Undoing:
        """What was changed until now, to be put back later where nothing else changed it meanwhile."""
        attributes = [(now, name, before, after) for (_, _, name), now, before, after in self.changes()]
        held = [(thing, was, _copy(thing)) for _, thing, was in self.held if not _same(thing, was)]
        filled: list[tuple[Any, Any, Any]] = [(thing, {}, dict(thing)) for thing in self.empty if thing]
        return Undoing(attributes, held + filled)


@dataclass
class Undoing:
    """Changes that can be put back: of dicts of attributes (what stood there, what does), and of containers."""

    attributes: list[tuple[dict[str, Any], str, Any, Any]]
    held: list[tuple[Any, Any, Any]]

    def moved(self) -> str | None:
        """What was changed and stands otherwise by now, in words; None where all of it stands as it did when this was made."""
        for table, name, _, after in self.attributes:
            now = table.get(name, MISSING)
            if now is not after and not (type(now) is type(after) and type(now) in _PLAIN and now == after):
                return f"the attribute {name!r}, into which the prefix had put something, by another call or by you"
        if not all(_same(thing, now) for thing, _, now in self.held):
            return "a list, a dict or an object, into which the prefix had put something, by another call or by you"
        return None

    def run(self) -> None:
        """Put back what stands as it stood when this was made."""
        for table, name, before, after in self.attributes:
            if table.get(name, MISSING) is not after:
                continue
            if before is MISSING:
                del table[name]
            else:
                table[name] = before
        for thing, was, now in self.held:
            if not _same(thing, now):
                continue
            if isinstance(thing, random.Random):
                thing.setstate(was)
                continue
            thing.clear()
            if isinstance(thing, (list, deque)):
                thing.extend(was)
            else:
                thing.update(was)


_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


def _same(thing: Any, was: Any) -> bool:
    if isinstance(thing, random.Random):
        return bool(thing.getstate() == was)
    if isinstance(thing, dict):
        return len(thing) == len(was) and all(thing.get(k, MISSING) is v for k, v in was.items())
    if isinstance(thing, set):
        return (
            len(thing) == len(was) and all(any(a is b for b in thing) for a in was) if len(was) < 65 else thing == was
        )
    return len(thing) == len(was) and all(a is b for a, b in zip(thing, was, strict=True))


def _copy(thing: Any) -> Any:
    if isinstance(thing, random.Random):
        return thing.getstate()
    return dict(thing) if isinstance(thing, dict) else type(thing)(thing)


def _opaque(value: Any) -> Any:
    """What a numpy array, a generator of numpy's or an object with `__slots__` holds; None where there is no telling."""
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    if bits is not None:
        return repr(bits.state)
    if hasattr(value, "tobytes"):
        return value.tobytes()
    try:
        return repr(value.__reduce_ex__(2)[1:])
    except Exception:  # whatever a class raises
        return None
