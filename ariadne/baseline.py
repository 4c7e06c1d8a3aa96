"""The baseline: a model's structure, flags, hooks and Python state as they were when a plan was captured."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ariadne.recorder import Recording, simple

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
StateTypes = tuple[tuple[torch.dtype, str, tuple[int, ...]], ...]


class Same:
    """Stands for one object, where a guard compares by identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __repr__(self) -> str:
        return repr(self.thing)


class Bytes:
    """A numpy array's bytes at one moment."""

    __slots__ = ("array", "held")

    def __init__(self, array: Any) -> None:
        self.array, self.held = array, array.tobytes()

    def __repr__(self) -> str:
        return f"an array of {len(self.held)} bytes"


def state_types(model: nn.Module) -> StateTypes:
    """The dtype, device type and shape of every parameter and buffer: what `.to(...)` and replacing them change."""
    return tuple((t.dtype, t.device.type, tuple(t.shape)) for t in (*model.parameters(), *model.buffers()))


class Baseline:
    """What guards compare a model with. `attributes`: (module path, keys, value) of plain attributes that forward read.

    A key after the first leads into a dict, or into an object's attributes. Nothing here belongs to one cut.
    """

    def __init__(self, model: nn.Module, recordings: Iterable[Recording] = ()) -> None:
        self.modules = dict(model.named_modules())
        self.training = {p: m.training for p, m in self.modules.items()}
        self.classes: dict[str, type] = {p: type(m) for p, m in self.modules.items()}
        self.children = {p: list(m._modules.items()) for p, m in self.modules.items()}
        self.hooks = {(p, h): list(m.__dict__[h].values()) for p, m in self.modules.items() for h in HOOKS}
        self.forwards = {p: m.__dict__.get("forward") for p, m in self.modules.items()}
        self.absent = {
            p: [(table, n) for table in ("_parameters", "_buffers") for n, t in m.__dict__[table].items() if t is None]
            for p, m in self.modules.items()
        }
        self.types = state_types(model)
        self.ties = self._ties()
        self.attributes: list[tuple[str, tuple[Any, ...], Any]] = []
        self.missing: set[tuple[str, str]] = set()
        seen: set[tuple[Any, ...]] = set()
        for recorded in recordings:
            changed = {(path, name) for path, name, _, _ in recorded.changed}
            self.missing |= recorded.missing
            for (path, name), (module, value, at) in recorded.read_attributes.items():
                if (path, name) not in changed and at not in recorded.moved and path in self.modules:
                    for keys, kept in _kept(module, name, value):
                        if (path, *keys) not in seen:
                            seen.add((path, *keys))
                            self.attributes.append((path, keys, kept))

    def _ties(self) -> list[list[tuple[str, str, str]]]:
        """The slots (module path, table, name) that hold one and the same tensor, where more than one does."""
        homes: dict[int, list[tuple[str, str, str]]] = {}
        for path, module in self.modules.items():
            for table in ("_parameters", "_buffers"):
                for name, t in module.__dict__[table].items():
                    if t is not None:
                        homes.setdefault(id(t), []).append((path, table, name))
        return [slots for slots in homes.values() if len(slots) > 1]

    def of_copy(self, copied: nn.Module) -> Baseline:
        """The same for a deep copy of the model: what had changed since capture counts as changed there too."""
        new = Baseline(copied)
        old = self.modules
        new.training, new.classes, new.types = dict(self.training), dict(self.classes), self.types
        new.absent, new.ties, new.missing = self.absent, self.ties, self.missing
        for path, module in old.items():
            if list(module._modules.items()) != self.children[path]:
                new.children[path] = self.children[path]
            if module.__dict__.get("forward") is not self.forwards[path]:
                new.forwards[path] = self.forwards[path]
            for h in HOOKS:
                if list(module.__dict__[h].values()) != self.hooks[path, h]:
                    new.hooks[path, h] = self.hooks[path, h]
        for path, keys, value in self.attributes:
            if isinstance(value, Bytes) and path in new.modules and value.array.tobytes() == value.held:
                value = Bytes(reach(new.modules[path], keys[:1]))
            if isinstance(value, Same) and path in new.modules and reach(old[path], keys) is value.thing:
                value = Same(reach(new.modules[path], keys))
            new.attributes.append((path, keys, value))
        return new


def owner_of(module: nn.Module, name: str) -> type | None:
    """The class in which a look-up of `name` on the module ends, if its own dict does not have it; None where there is none."""
    return next((c for c in type(module).__mro__ if name in c.__dict__), None)


def table_of(module: nn.Module, keys: tuple[Any, ...]) -> dict[Any, Any]:
    """The dict that holds the last of `keys`: the module's own, its class's, or that of what an attribute holds."""
    if len(keys) == 1:
        owner, own = owner_of(module, keys[0]), module.__dict__
        return own if keys[0] in own or owner is None else owner.__dict__  # type: ignore[return-value]
    held = module.__dict__[keys[0]]
    return held if isinstance(held, dict) else held.__dict__


def reach(module: nn.Module, keys: tuple[Any, ...]) -> Any:
    """What stands at `keys` now; the module itself where nothing does."""
    try:
        return table_of(module, keys)[keys[-1]]
    except (KeyError, AttributeError):
        return module


def _kept(module: nn.Module, name: str, value: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """What a guard keeps of an attribute that forward read: plain values as they are, of anything else its identity."""
    mine = name in module.__dict__
    if simple(value):
        owner = owner_of(module, name)
        plain = owner is not None and not hasattr(
            type(owner.__dict__[name]), "__get__"
        )  # else a property: what it reads counts
        if mine or plain:
            yield (name,), value
        return
    if not mine or isinstance(value, torch.Tensor):
        return
    yield (name,), Same(value)
    if type(value).__name__ == "ndarray":
        yield (name, "data"), Bytes(value)
    members = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if isinstance(members, dict) and not isinstance(value, (type, types.FunctionType, nn.Module)):
        for key, member in members.items():
            if simple(member):
                yield (name, key), member
