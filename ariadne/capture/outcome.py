"""What forward leaves behind: its output, what it stores in the model, and what it puts into containers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from ariadne import tree
from ariadne.capture.state import Snapshot
from ariadne.capture.values import CONSTANTS, SYMBOLIC, Values
from ariadne.capture.wanted import TELL
from ariadne.errors import SpecError, UnsupportedError, named
from ariadne.guards import SIMPLE, Change, Place, Put, Recording, is_a, lasts, refused
from ariadne.plan import Ref, Store, tensors_in


def refuse_unrun(output: Any) -> None:
    """Raise `SpecError` for a forward of which nothing has run when it returns."""
    if isinstance(output, (GeneratorType, CoroutineType, AsyncGeneratorType)):
        what = "a coroutine" if isinstance(output, CoroutineType) else "a generator"
        raise SpecError(
            f"forward returns {what}, whose code runs when it is asked for its values, after the call that would be split; have "
            "forward return them, as a list or a tuple (return [*self.parts(x)])"
        )


def _is_made_leaf(t: torch.Tensor) -> bool:
    """Whether a tensor, if ops made it, was made a leaf of autograd's: a parameter, or one that was told to require grad.

    A view that `no_grad` made is a leaf too, and requires grad where its base does.
    """
    if isinstance(t, Parameter):
        return True
    inherits = t._is_view() and t._base is not None and t._base.requires_grad
    return (
        not inherits and t.is_leaf and t.requires_grad
    )  # of a view that `no_grad` made, and wrote, torch tells nothing


def _containers(value: Any) -> Iterator[Any]:
    """The lists and dicts that a value is, or that it holds within others and in tuples."""
    todo, seen = [value], set[int]()
    while todo:
        one = todo.pop()
        if not is_a(one, (list, dict, tuple)) or id(one) in seen:
            continue
        seen.add(id(one))
        if not is_a(one, tuple):
            yield one
        todo += dict.values(one) if is_a(one, dict) else one


def _shown(leaf: torch.Tensor) -> str:
    return "a Parameter" if isinstance(leaf, Parameter) else "a tensor that requires grad (by requires_grad_())"


@dataclass(frozen=True)
class Outcome:
    """What a recorded forward left, once its ops have become those of a plan."""

    recorded: Recording
    snapshot: Snapshot
    values: Values

    def output(self) -> tuple[tree.Spec, tuple[Any, ...]]:
        """The structure of what forward returned, and its leaves as the plan names them."""
        leaves, spec = self._made(self.recorded.output)
        self._refuse_read_leaves(leaves)
        atoms = tuple(self._output(leaf) for leaf in leaves)
        return self._classed(spec, iter(leaves)), atoms

    def _made(self, value: Any) -> tuple[list[Any], tree.Spec]:
        """The leaves and the structure of what forward makes, cached properties included, for a plan to make more of it."""
        leaves, spec = tree.flatten(value, cached=True)
        return leaves, tree.of_any(spec, self.snapshot.holds)

    def _output(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise UnsupportedError(
                "forward returns a nested tensor, which a plan can't hold; return to_padded_tensor(0.0, size) of it, and the mask"
            )
        if is_a(leaf, Enum) and not isinstance(leaf, CONSTANTS):  # there is one of it, which is no container of tensors
            return self.values.object(leaf)
        atom = self.values.atom(leaf)
        if isinstance(leaf, (list, tuple)) or (isinstance(atom, Ref) and atom.name in self.values.objects):
            cache = (
                ". Where it is a cache of keys and values, pass use_cache=False (to a command, --input use_cache=False)"
            )
            raise UnsupportedError(
                f"forward returns an object of type {type(leaf).__name__}, which is neither a tensor, a number, a string, "
                "a known container nor one of the inputs; return its parts, or register the type with torch.utils._pytree"
                + (cache if "Cache" in type(leaf).__name__ else "")
            )
        return atom

    def _classed(self, spec: tree.Spec, leaves: Iterator[Any]) -> tree.Spec:
        """The structure of the output, with the classes of the tensors that ops made; those of inputs and state are as they are.

        Ops on tensors of a class may give tensors of that class, so where there are any, plain ones are told, too.
        """
        around = any(tree.subclass_of(t) for e in self.recorded.events for t in tensors_in(e.args))

        return self._class_of(spec, leaves, around)

    def _class_of(self, spec: tree.Spec, leaves: Iterator[Any], around: bool) -> tree.Spec:
        if spec.kind != tree.LEAF:
            return replace(spec, children=tuple([self._class_of(c, leaves, around) for c in spec.children]))
        leaf = next(leaves)
        if not isinstance(leaf, torch.Tensor) or not self._is_ops(leaf):
            return spec
        if _is_made_leaf(leaf):
            made = Parameter if isinstance(leaf, Parameter) else tree.subclass_of(leaf) or torch.Tensor
            made = torch.Tensor if issubclass(made, FakeTensor) else made
            return tree.Spec("subclass", made, children=(spec,), context=leaf.requires_grad)
        if isinstance(leaf, FakeTensor):
            return spec
        cls = tree.subclass_of(leaf)
        if cls is None and not (around and type(leaf) is torch.Tensor):
            return spec
        if cls is not None and vars(leaf):
            raise UnsupportedError(
                f"forward returns a {cls.__name__} with attributes of its own ({', '.join(sorted(vars(leaf)))}), which a plan "
                "can't hold; return a plain tensor and the attributes beside it, and make the object outside"
            )
        return tree.Spec("subclass", cls or torch.Tensor, children=(spec,))

    def _refuse_read_leaves(self, leaves: list[Any]) -> None:
        """Raise `UnsupportedError` for a leaf that forward makes and returns, if that is not all that it does with it."""
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and _is_made_leaf(leaf)]
        for leaf in made:
            twice = sum(leaf is other for other in leaves) > 1
            if self._is_ops(leaf) and (id(leaf) in self._read or twice):
                raise UnsupportedError(
                    f"forward returns {_shown(leaf)} that it makes itself{' twice' if twice else ', and computes with it too'}: "
                    "its gradient would come from there, too, which a plan can't hold. Make it outside, of what forward returns"
                )

    def _is_ops(self, leaf: torch.Tensor) -> bool:
        """Whether an op made it: it is neither an input, which an op may have written into, nor the model's."""
        if any(leaf is given for given in self.values.input_tensors):
            return False
        atom = self.values.atom(leaf)
        value = self.values.by_name.get(atom.name) if isinstance(atom, Ref) else None
        return value is not None and value.kind == "tensor"

    def buffer_stores(self) -> Iterator[Store]:
        """The tensors that forward put in the place of buffers."""
        for path, name, t in self.recorded.stores:
            self._refuse_class([t], f"buffer {name!r} of {named(path)}")
            yield Store(path, "_buffers", name, tree.Spec(tree.LEAF), (self.values.tensor(t),))

    def attribute_stores(self) -> Iterator[Store]:
        """What forward assigned to plain attributes without having read them first, or looked for them in vain.

        A module that also changed an attribute after reading it keeps a cache, which is of no use without all its parts:
        nothing of that module is stored. So it is with what forward sets up at its first call. Where the cache is another
        module's, a second run tells: see `history.assigned_once`.
        """
        caching = self._caching()
        for path, name, now in self._assigned():
            if path in caching:
                continue
            if path in self.snapshot.strays:
                raise UnsupportedError(
                    f"forward assigns attribute {name!r} of {named(path)}, a module that stands in no registry; register it as a "
                    "submodule, or keep what it assigns in a buffer"
                )
            if self._is_returned(now):
                raise UnsupportedError(
                    f"forward returns the very list or dict that it leaves in attribute {name!r} of {named(path)}, of which a plan "
                    "makes two: what is put into the one is not in the other. Return a copy, or leave a copy there (dict(found))"
                )
            leaves, spec = self._made(now)
            leaf = next(
                (t for t in leaves if isinstance(t, torch.Tensor) and _is_made_leaf(t) and self._is_ops(t)), None
            )
            if leaf is not None:
                raise UnsupportedError(
                    f"forward leaves {_shown(leaf)} that it makes itself in attribute {name!r} of {named(path)}, and a plan keeps "
                    "plain tensors there; keep it detached, or make it outside"
                )
            self._refuse_class(leaves, f"attribute {name!r} of {named(path)}")
            if not all(isinstance(leaf, (torch.Tensor, *SYMBOLIC, *CONSTANTS)) for leaf in leaves):
                raise UnsupportedError(
                    f"forward leaves a {type(now).__name__} in attribute {name!r} of {named(path)}, which a plan can't "
                    "hold; return it instead, or keep tensors and numbers"
                )
            yield Store(path, "__dict__", name, spec, tuple(self.values.atom(leaf) for leaf in leaves))

    def _refuse_class(self, leaves: Iterable[Any], where: str) -> None:
        kind = next((cls for cls in map(tree.subclass_of, leaves) if cls is not None), None)
        if kind is not None:
            raise UnsupportedError(
                f"forward leaves a tensor of class {kind.__name__} in {where}, and a plan keeps plain tensors there; keep it as a "
                "plain tensor (.as_subclass(torch.Tensor)), or return it"
            )

    def _caching(self) -> set[str]:
        """The modules that keep a cache: forward changed what it had read there, or looked for in vain."""
        reads = self.recorded.read_attributes.keys() | self.recorded.missing
        return {path for path, name, _, _ in self.recorded.changed if (path, name) in reads}

    def _assigned(self) -> Iterator[tuple[str, str, Any]]:
        caching = self._caching()
        for path, name, _, now in self.recorded.changed:
            plain = isinstance(now, (int, torch.SymInt))  # may be stored though it was read: see `capture.settled`
            if (path, name) in self.recorded.written or (plain and path in caching):
                yield path, name, now

    def put(self) -> dict[tuple[Place, Any], Put]:
        """What forward put into containers, at each key; and what it assigned in modules that keep a cache, too."""
        found: dict[tuple[Place, Any], Put] = {}
        caching = self._caching() & self.snapshot.modules.keys()
        for path, name, now in self._assigned():
            if path in caching:
                held = Place("held", path, ())
                found[held, name] = self._put(held, Change("dict", {}, {name: now}), name)
        for place, change in self.recorded.effects.items():
            for key in () if change.kind == "set" else change.put():
                found[place, key] = self._put(place, change, key)
        return found

    @cached_property
    def _read(self) -> set[int]:
        """The tensors that ops read, by id, but for the inputs: these are read anew at each call."""
        read = {id(t) for e in self.recorded.events if e.target is not TELL for t in tensors_in(e.args)}
        return read - {*map(id, self.values.input_tensors)}

    @cached_property
    def _returned(self) -> set[int]:
        """The lists and dicts that forward returns, by id."""
        return {*map(id, _containers(self.recorded.output))}

    def _is_returned(self, value: Any) -> bool:
        """Whether forward returns this very list or dict, or one that it holds."""
        return any(id(one) in self._returned for one in _containers(value))

    def _is_registered(self, t: torch.Tensor) -> bool:
        """Whether a tensor is a buffer or a parameter, so that a plan reads it there, wherever else it stands."""
        return self.values.state.get(id(t), ("", ()))[0] in ("buffer", "parameter")

    def _put(self, place: Place, change: Change, key: Any) -> Put:
        """What was put into a container at one key; or the error that says why no plan can put it there."""
        value = change.after[key]
        before = change.before.get(key) if isinstance(change.before, dict) else (*change.before[key : key + 1], None)[0]
        leaves, spec = self._made(value)
        if any(
            id(t) in self._read and not self._is_registered(t) for t in tree.leaves(before) if is_a(t, torch.Tensor)
        ):
            return refused(
                place, key, "in place of a tensor that it reads, which a plan can't follow; keep it in a buffer"
            )
        if not is_a(key, SIMPLE) and not lasts(key):
            return refused(place, key, f"under a key that is a {type(key).__name__}; use strings and numbers as keys")
        if self._is_returned(value):
            return refused(
                place,
                key,
                "that it returns, too, a list or a dict, of which a plan makes two; return a copy, or put a copy there",
            )
        if place.path in self.snapshot.strays:
            return refused(place, key, "of a module that stands in no registry; register it as a submodule")
        if not all(isinstance(leaf, (torch.Tensor, *SYMBOLIC, *CONSTANTS)) for leaf in leaves):
            kind = next(type(v).__name__ for v in leaves if not isinstance(v, (torch.Tensor, *SYMBOLIC, *CONSTANTS)))
            return refused(
                place, key, f"that a plan can't hold, a {kind}; keep tensors and numbers there, or return it"
            )
        leaf = next((t for t in leaves if isinstance(t, torch.Tensor) and _is_made_leaf(t) and self._is_ops(t)), None)
        if leaf is not None:
            return refused(
                place,
                key,
                f"that a plan can't hold, {_shown(leaf)} that forward makes itself; keep it detached, or return it",
            )
        classed = (tree.subclass_of(t) for t in leaves if isinstance(t, torch.Tensor) and self._is_ops(t))
        if (made := next((cls for cls in classed if cls is not None), None)) is not None:
            return refused(
                place,
                key,
                f"that a plan can't hold, a tensor of class {made.__name__}; keep it as a plain tensor "
                "(.as_subclass(torch.Tensor)), or return it",
            )
        try:
            return spec, tuple(self.values.atom(leaf) for leaf in leaves)
        except UnsupportedError as error:
            return error
