"""Arguments of ops: trees of tuples over uses of values, sizes and constants; walked, replaced, shown, and told as data."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ariadne import tree
from ariadne.plan.expr import Expr


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the plan's value called `name`; `item` picks one element where the value is a sequence."""

    name: str
    item: int | None = None

    def __str__(self) -> str:
        return self.name if self.item is None else f"{self.name}[{self.item}]"


def uses(atoms: Any) -> Iterator[str]:
    """The names that a tree of arguments refers to."""
    if isinstance(atoms, Ref):
        yield atoms.name
    elif isinstance(atoms, Expr):
        yield from sorted(atoms.names)
    elif isinstance(atoms, tuple):
        for a in atoms:
            yield from uses(a)
    elif isinstance(atoms, slice):
        yield from uses((atoms.start, atoms.stop, atoms.step))


def substitute(atoms: Any, function: Callable[[Any], Any]) -> Any:
    """The same tree of arguments with `function` applied to each `Ref` and `Expr`."""
    if isinstance(atoms, (Ref, Expr)):
        return function(atoms)
    if isinstance(atoms, slice):
        return slice(*(substitute(a, function) for a in (atoms.start, atoms.stop, atoms.step)))
    if type(atoms) is tuple:
        return tuple(substitute(a, function) for a in atoms)
    return atoms


def show(atom: Any) -> str:
    """An argument as Python source; tensors and ops by name."""
    if isinstance(atom, (Ref, Expr)):
        return str(atom)
    if type(atom) is tuple:
        return f"({', '.join(show(a) for a in atom)}{',' if len(atom) == 1 else ''})"
    if isinstance(atom, slice):
        return f"slice({show(atom.start)}, {show(atom.stop)}, {show(atom.step)})"
    return repr(atom)


def show_tree(spec: tree.Spec, leaves: list[str]) -> str:
    """A nested value with these leaves as Python source."""
    rest = iter(leaves)

    def walk(node: tree.Spec) -> str:
        if node.kind == tree.LEAF:
            return next(rest)
        inner = [walk(c) for c in node.children]
        if node.kind == "list":
            return f"[{', '.join(inner)}]"
        if node.kind == "tuple":
            return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
        if node.kind == "dict":
            return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(node.keys, inner, strict=True)) + "}"
        names = [str(k) for k in node.keys] or [""] * len(inner)
        inner = [f"{k}={v}" if k else v for k, v in zip(names, inner, strict=True)]
        return f"{node.cls.__name__ if node.cls else ''}({', '.join(inner)})"

    return walk(spec)


def as_data(atom: Any, home: str = "") -> Any:
    """An argument as JSON-able data, told apart by type; the device `home` as any."""
    if atom is None or type(atom) in (bool, str):
        return atom
    if isinstance(atom, Ref):
        return {"ref": atom.name, "item": atom.item}
    if isinstance(atom, Expr):
        return {"expr": atom.source}
    if isinstance(atom, (tuple, list)):
        return [as_data(a, home) for a in atom]
    if type(atom) is int:
        return atom
    if isinstance(atom, float):  # numpy's float64 is one, too
        return {type(atom).__name__: float.hex(atom)}
    if isinstance(atom, slice):
        return {"slice": [as_data(atom.start), as_data(atom.stop), as_data(atom.step)]}
    if isinstance(atom, torch.device) and str(atom) in (home, home.partition(":")[0]):
        return {"device": "any"}
    if isinstance(atom, (torch.dtype, torch.device, torch.layout, torch.memory_format, complex, int, str)):
        return {type(atom).__name__: str(atom)}
    if isinstance(atom, torch.Tensor):
        return {"tensor": digest(atom)}
    return {"object": f"{type(atom).__module__}.{type(atom).__qualname__}"}


def digest(tensor: torch.Tensor) -> str:
    """What tells a tensor's dtype, shape and data from those of others."""
    data = tensor.detach().cpu().contiguous().view(-1)
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    raw = ctypes.string_at(data.data_ptr(), data.nbytes) if data.numel() else b""
    return hashlib.sha256(head + raw).hexdigest()[:16]
