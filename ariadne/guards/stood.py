"""Stood: what earlier calls of a model put into its attributes, where a plan makes it anew as a first call does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn

from ariadne import tree
from ariadne.guards.attributes import is_a
from ariadne.guards.kept import Kept
from ariadne.plan import as_bytes

Key = tuple[str, str]  # the path of a module, and the name of an attribute


class _Tensor:
    """A tensor that stood in an attribute, and what it held."""

    __slots__ = ("content", "form", "tensor", "version")

    def __init__(self, t: torch.Tensor) -> None:
        self.tensor, self.version, self.form = ref(t), _version(t), _form(t)
        self.content = _content(t)

    def is_still(self, now: torch.Tensor) -> bool:
        """Whether it holds that still, or one of another form has come for it, as forward makes them for other sizes."""
        if now is self.tensor() and _version(now) == self.version:
            return True
        if _form(now) != self.form:
            return now is not self.tensor()
        if _content(now) != self.content:
            return False
        self.tensor, self.version = ref(now), _version(now)
        return True


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _form(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, tuple(t.shape), t.device


def _content(t: torch.Tensor) -> bytes:
    return hashlib.blake2b(as_bytes(t).numpy()).digest()


class AsStood(Kept):
    """What stood in attributes that an earlier call of the model had filled: the model goes on with it, and a plan with what it
    makes anew, which is the same as long as nobody else writes there.

    Tensors count by what they hold, and numbers with a point; what forward empties, and fills for other sizes, it makes anew.
    """

    __slots__ = ("places",)

    def __init__(self, thing: nn.Module, slots: Mapping[Key, Any]) -> None:
        self.places = [(thing.get_submodule(path).__dict__, name, path) for path, name in slots]
        super().__init__(thing)
        self.held = [[*map(_noted, tree.leaves(value))] for value in slots.values()]

    def look(self, thing: Any) -> Any:
        """Nothing, so that no tensor that forward lets go of lives on: what stood there is noted apart."""

    def words(self, held: Any) -> str:
        """The attributes in which something else stands."""
        return ", ".join(self._others())

    def is_same(self) -> bool:
        """Whether nothing but forward itself has put something else there."""
        return next(self._others(), None) is None

    def anew(self, thing: Any) -> Kept:
        """The same of a copy."""
        there = ((path, name, thing.get_submodule(path).__dict__) for _, name, path in self.places)
        return type(self)(thing, {(path, name): own[name] for path, name, own in there if name in own})

    def _others(self) -> Iterator[str]:
        for (own, name, path), noted in zip(self.places, self.held, strict=True):
            value = own.get(name)
            now = [value] if type(value) is torch.Tensor else [*tree.leaves(value)]
            if len(now) == len(noted) and not all(map(_is_still, noted, now)):
                yield f"{path}.{name}".lstrip(".")


def _noted(leaf: Any) -> Any:
    plain = is_a(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized
    if plain and leaf.device.type != "meta":
        return _Tensor(leaf)
    return leaf if type(leaf) is float else None


def _is_still(noted: Any, now: Any) -> bool:
    if type(noted) is _Tensor:
        return not is_a(now, torch.Tensor) or now.layout is not torch.strided or now.is_nested or noted.is_still(now)
    return type(noted) is not float or type(now) is not float or tree.identical(noted, now)
