"""What forward puts into containers of the model: a half has its own, at the model's names, empty when it is loaded."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ariadne.errors import HalfError
from ariadne.guards import Attribute
from ariadne.halves.atoms import Reader, count, items, need, text, told
from ariadne.plan import Store

_HOW = {
    "dict": ("set", "grow", "remove"),
    "object": ("set",),
    "list": ("append", "contents"),
    "deque": ("append", "contents"),
}
_MAKES: dict[str, Callable[[int | None], Any]] = {
    "dict": lambda _: {},
    "object": lambda _: SimpleNamespace(),
    "list": lambda _: [],
    "deque": lambda most: deque(maxlen=most),
}
_MOST = 16  # containers within each other


@dataclass(frozen=True)
class Container:
    """A container that forward puts something into: its module, the steps to it, and its kind.

    The first of the steps is an attribute's name. `most`: how many a deque holds, at most.
    """

    path: str
    steps: tuple[Any, ...]
    kind: str
    most: int | None = None


def told_containers(store: Store, model: nn.Module) -> list[Any]:
    """What a store puts where, beside its values, as JSON-able data; `HalfError` for containers that no file can name."""
    at: Any = model.get_submodule(store.path).__dict__
    kinds = []
    for i, step in enumerate(store.container):
        at = _below(at, step) if at is not None else None
        kinds.append(_kind_of(at, store, i))
    steps = [["attribute", str(s)] if isinstance(s, Attribute) else ["key", told(s)] for s in store.steps]
    return [store.how, steps, kinds]


def _below(at: Any, step: Any) -> Any:
    """What stands in a container; None where nothing does yet."""
    return getattr(at, step, None) if isinstance(step, Attribute) else at.get(step)


def _kind_of(thing: Any, store: Store, i: int) -> list[Any]:
    """The kind of the container after `i` more steps than one, as it is or as the next step wants it."""
    last = i + 1 == len(store.container)
    after = store.steps[i + 1] if i + 1 < len(store.steps) else None
    kind = "object" if isinstance(after, Attribute) else "list" if last and store.how in _HOW["list"] else "dict"
    fits = {
        "object": not isinstance(thing, (nn.Module, type)),
        "list": type(thing) in (list, deque),
        "dict": type(thing) in (dict, OrderedDict, defaultdict),
    }
    if thing is not None and not fits[kind]:
        raise HalfError(
            f"forward puts something into a {type(thing).__name__} ({store.where}), which a file can't hold; put it into a dict, a "
            "list, a deque or a plain object, or return it"
        )
    return ["deque", thing.maxlen] if type(thing) is deque else [kind, None]


def read_containers(data: list[Any], path: str) -> tuple[str, tuple[Any, ...], list[Container]]:
    """What `told_containers` wrote: how something is put, the steps to where, and the containers on the way, outermost first."""
    need(len(data) == 3, "what is stored is malformed")
    how, steps = text(data[0], "what is stored"), tuple(_step(s) for s in items(data[1], "steps"))
    kinds = [items(k, "a container") for k in items(data[2], "containers")]
    inner = len(steps) - (how in _HOW["dict"])
    need(0 < len(kinds) == inner <= _MOST and all(len(k) == 2 for k in kinds), "what is stored is malformed")
    need(type(steps[0]) is str and is_free(steps[0]), f"nothing is stored at {str(steps[0])[:80]!r}")
    found = []
    for i, (kind, most) in enumerate(kinds):
        last = i + 1 == inner
        need(
            type(kind) is str and kind in _MAKES and how in (_HOW[kind] if last else how), "what is stored is malformed"
        )
        if i + 1 < len(steps):
            need((kind == "object") == isinstance(steps[i + 1], Attribute), "what is stored is malformed")
        need(last or kind in ("dict", "object"), "what is stored is malformed")
        need(most is None or kind == "deque", "what is stored is malformed")
        found.append(
            Container(path, steps[: i + 1], kind, None if most is None else count(most, "a length", most=2**31))
        )
    return how, steps, found


_KEYS = (str, int, float, bool, torch.device, torch.dtype)


def _step(data: Any) -> Any:
    parts = items(data, "a step")
    need(len(parts) == 2 and parts[0] in ("attribute", "key"), "a step is malformed")
    if parts[0] == "attribute":
        name = text(parts[1], "an attribute")
        need(_is_plain(name), f"nothing is stored at {name[:80]!r}")
        return Attribute(name)
    key = Reader().atom(parts[1])
    need(key is None or type(key) in _KEYS, "a step is malformed")
    return key


def is_free(name: str) -> bool:
    """Whether an attribute of a module may be called so: torch has none of that name."""
    mine = hasattr(nn.Module, name) or name in nn.Module().__dict__
    return _is_plain(name) and not mine


def _is_plain(name: str) -> bool:
    """Whether Python's parser reads a name as just that: it takes other letters for those that they look like."""
    return name.isidentifier() and name.isascii() and not name.startswith("__")


def make(root: nn.Module, containers: Iterable[Container]) -> None:
    """Put empty containers into the modules of a half."""
    for one in containers:
        module = root.get_submodule(one.path)
        name = one.steps[0]
        taken = name in module._parameters or name in module._buffers or name in module._modules
        need(not taken, f"the name {name[:80]!r} is taken")
        at: Any = module.__dict__
        for step in one.steps[:-1]:
            at = _below(at, step)
        was, new = _below(at, one.steps[-1]), _MAKES[one.kind](one.most)
        if was is None:
            if isinstance(one.steps[-1], Attribute):
                setattr(at, one.steps[-1], new)
            else:
                at[one.steps[-1]] = new
        else:
            need(type(was) is type(new), f"{name[:80]!r} is a container of two kinds")


def left(root: nn.Module, stores: Iterable[Store]) -> dict[str, Any]:
    """What forward has left in plain attributes, by their names in the model."""
    found = {}
    for store in stores:
        name = store.steps[0] if store.inside else store.name
        table = root.get_submodule(store.path).__dict__
        if store.table != "_buffers" and name in table:
            found[f"{store.path}.{name}".removeprefix(".")] = table[name]
    return found


def empty(root: nn.Module, stores: Iterable[Store]) -> None:
    """Empty the lists to which forward appends."""
    for store in stores:
        if store.how in ("append", "grow"):
            at: Any = root.get_submodule(store.path).__dict__
            for step in store.steps:
                at = _below(at, step) if at is not None else None
            if at is not None:
                at.clear()
