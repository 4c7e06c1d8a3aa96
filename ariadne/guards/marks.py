"""Marks: what forward's Python asks of tensors beside their values and sizes: attributes set on them, strides, their very class."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.guards.attributes import BOOKKEEPING, MISSING, follow, is_a, lasts, own_of, place, shown
from ariadne.guards.facts import alike as tensors_alike
from ariadne.guards.facts import never
from ariadne.guards.kept import Kept, OfTables, registries_of, told_apart
from ariadne.guards.opened import alike, unfolded

ASKING_FOR_CLASSES = frozenset({"Buffer", "Parameter", "__class__", "type"})  # names in the code of who asks


def marks_on(t: torch.Tensor, names: frozenset[str]) -> dict[str, Any]:
    """The attributes of these names that Python set on a tensor."""
    own = own_of(t)
    if not own or names.isdisjoint(own):
        return {}
    return {n: v if lasts(v) else list(unfolded(v, names)) for n, v in own.items() if n in names}


def same_marks(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether two tensors carry the same: plain values that are equal, and otherwise the same things."""
    return now.keys() == then.keys() and all(_same(now[name], then[name]) for name in then)


def _same(a: Any, b: Any) -> bool:
    if type(a) is list and type(b) is list:
        return alike(a, b)
    return a is b or (lasts(a) and lasts(b) and tree.identical(a, b))


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a model, each under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tables(model: nn.Module, names: Sequence[str]) -> list[tuple[str, Any, str]]:
    """Where parameters and buffers of these names stand: (name, the module's table, the key in it)."""
    there = dict(model.named_modules(remove_duplicate=False))
    parts = [(name, there.get(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    # A module that is gone is for the guards of the model's structure to say.
    return [(n, m._parameters if k in m._parameters else m._buffers, k) for n, m, k in parts if m is not None]


_Kind = tuple[type, bool, torch.layout]


class Marks(Kept):
    """The attributes, of those that forward asks for, that stand on some of a model's parameters and buffers.

    `places`, by what they are called: (module path, keys) of further tensors, which plain attributes hold. The plan reads these
    anew at each call, too.
    """

    __slots__ = ("held_at", "names", "places", "tables", "tensors")

    def __init__(
        self, thing: nn.Module, tensors: Sequence[str], names: frozenset[str],
        places: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.tensors, self.names, self.places = tensors, names, places
        self.tables = _tables(thing, tensors)
        there = dict(thing.named_modules()) if places else {}
        self.held_at = [(n, there[path].__dict__, keys) for n, (path, keys) in places.items() if path in there]
        super().__init__(thing)

    def anew(self, thing: Any) -> Marks:
        """The same of another model."""
        return type(self)(thing, self.tensors, self.names, self.places)

    def look(self, thing: Any) -> dict[str, Any]:
        """By the tensor's name and the attribute's."""
        found = [(n, table.get(key)) for n, table, key in self.tables]
        for name, own, keys in self.held_at:
            try:
                found.append((name, follow(own[keys[0]], keys[1:])))
            except (LookupError, AttributeError, TypeError):  # that none stands there is for other guards to say
                continue
        tensors = ((n, t) for n, t in found if is_a(t, torch.Tensor))
        return {f"{n}.{k}": v for n, t in tensors for k, v in self.on(t).items()}

    def on(self, t: torch.Tensor) -> dict[str, Any]:
        """Those of one tensor."""
        return marks_on(t, self.names)

    def words(self, held: dict[str, Any]) -> str:
        """The attributes that are not alike in the two."""
        now = self.look(self.thing)
        differ = [n for n in {**self.held, **now} if not _same(self.held.get(n, MISSING), now.get(n, MISSING))]
        return ", ".join(f"{n} = {reprlib.repr(held[n])}" if n in held else f"no {n}" for n in differ[:3] or held)

    def is_same(self) -> bool:
        """Whether the same attributes stand there."""
        return same_marks(self.look(self.thing), self.held)


class Ungraded(Marks):
    """That some of a model's buffers have no gradient, and want none, of which forward asked for it."""

    __slots__ = ()

    def on(self, t: torch.Tensor) -> dict[str, Any]:
        """Whether it has one after all, or may get one."""
        return {"grad": True} if t.requires_grad or t.grad is not None else {}


class Strides(Kept):
    """The strides of a model's tensors, which those of what ops make of them follow."""

    __slots__ = ("same", "tables")

    def __init__(self, thing: nn.Module) -> None:
        self.tables = _tables(thing, [name for name, _ in state_of(thing)])
        for path, module in thing.named_modules():
            own = module.__dict__
            self.tables += [(f"{path}.{k}".lstrip("."), own, k) for k, v in own.items() if type(v) is torch.Tensor]
        self.same = never
        super().__init__(thing)

    def look(self, thing: Any) -> tuple[Any, ...]:
        """The name and strides of each that has any, of which `t.data = ...` may give it others."""
        found = ((n, table.get(key)) for n, table, key in self.tables)
        return tuple(
            (n, t.stride()) for n, t in found if is_a(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested
        )

    def words(self, held: tuple[Any, ...]) -> str:
        """Those that are not alike in the two."""
        other = self.look(self.thing) if held is self.held else self.held
        return ", ".join(f"{name} = {list(strides)}" for name, strides in held if (name, strides) not in other)

    def is_same(self) -> bool:
        """Whether they have the same strides."""
        tensors = [table.get(key) for _, table, key in self.tables]
        if self.same(*tensors):  # as they were when they were last looked at one by one
            return True
        self.same = never  # which lets go of those that it knew
        if self.look(self.thing) != self.held:
            return False
        self.same = tensors_alike(tensors) if all(is_a(t, torch.Tensor) for t in tensors) else never
        return True


class Registered(Kept):
    """Which parameters and buffers a model's modules have, of which forward looked through all."""

    __slots__ = ("tables",)

    def __init__(self, thing: nn.Module) -> None:
        self.tables = registries_of(thing)
        super().__init__(thing)

    def look(self, thing: Any) -> list[list[tuple[str, bool]]]:
        """The names of each module's own, and whether a tensor stands there."""
        return [[(name, t is None) for name, t in table.items()] for _, table in self.tables]

    def words(self, held: list[list[tuple[str, bool]]]) -> str:
        """Those that are not alike in the two."""
        other = self.look(self.thing) if held is self.held else self.held
        every = zip(self.tables, held, other, strict=True)
        found = [f"{path}.{name}".lstrip(".") for (path, _), a, b in every for name, _ in a if a != b]
        return ", ".join(found[:8]) or "none besides"


class Asked(OfTables):
    """What Python asks of a model's parameters and buffers by which stand where, and no op shows: whether one does.

    `asked`, any of: "class", of which class it is; "ties", which places hold the same one; "sparse", of which layout it is. It is
    looked up anew after something was put into a table of theirs.
    """

    __slots__ = ("aside", "asks", "filled", "tables")

    def __init__(self, thing: nn.Module, asked: frozenset[str]) -> None:
        self.asks, self.aside = asked, frozenset[str]()
        self.tables = registries_of(thing)
        self.filled = [table for _, table in self.tables if table]
        super().__init__(thing)

    def look(self, thing: Any) -> dict[str, tuple[Any, ...]]:
        """By the name of a place: whether one stands there, its class, and the first place that holds it."""
        first: dict[int, str] = {}
        found: dict[str, tuple[Any, ...]] = {}
        for path, table in self.tables:
            for key, t in table.items():
                name = f"{path}.{key}".lstrip(".")
                if name in self.aside:
                    continue
                same = first.setdefault(id(t), name) if "ties" in self.asks and t is not None else ""
                kind = type(t).__name__ if "class" in self.asks and t is not None else ""
                if "sparse" in self.asks and t is not None and t.layout is not torch.strided:
                    kind = f"{kind or 'one'} of layout {t.layout}"
                found[name] = (t is None, kind, same)
        return found

    def words(self, held: dict[str, tuple[Any, ...]]) -> str:
        """Those that are not alike in the two."""
        other = self.look(self.thing) if held is self.held else self.held
        told = []
        for name, (none, kind, same) in held.items():
            if other.get(name) != held[name]:
                shared = f"the same as {same}" if same not in ("", name) else ""
                told.append(f"{name} = {'None' if none else shared or kind or 'one of its own'}")
        return ", ".join(told[:4]) or "none besides"

    def anew(self, thing: Any) -> Kept:
        """The same of another model."""
        return type(self)(thing, self.asks)

    def without(self, names: Collection[str]) -> Asked:
        """The same, but of these places, into which the plan itself puts something before it is asked."""
        found, first = copy.copy(self), dict[str, str]()
        found.aside, found.held = frozenset(names), {}
        for name, (none, kind, same) in self.held.items():
            if name not in names:
                found.held[name] = none, kind, first.setdefault(same, name) if same in names else same
        return found

    def is_same(self) -> bool:
        """Whether the answers are the same; of what stands in another table now, or is gone; of what came, others say so."""
        now = self.look(self.thing)
        return all(now.get(name) == is_so for name, is_so in self.held.items())

    def rests_on(self) -> list[dict[str, Any]]:
        """Those in which any stood: what went elsewhere was taken out of one of these."""
        return self.filled

    def asks_as(self, other: Kept) -> bool:
        """Whether that asks of the same model what this one asks."""
        if type(other) is not Asked or other.thing is not self.thing or other.asks != self.asks:
            return False
        return bool(other.held == self.held) and list(map(id, other.filled)) == list(map(id, self.filled))


class Classes(OfTables):
    """Of which class each thing is that stands where forward found tensors in a module's attributes, and in what these hold.

    A plan reads these anew at each call. Any tensor will do but for what forward `asks`, any of: "class", of which class one is;
    "requires_grad", whether it does; "sparse", of which layout it is.
    """

    __slots__ = ("asks", "is_told", "kinds", "places", "slots", "where")

    def __init__(self, thing: nn.Module, places: Sequence[tuple[Any, ...]], asks: frozenset[str]) -> None:
        self.places, self.asks, own = places, asks, thing.__dict__
        # What holds them is guarded by itself: it stays the same.
        self.slots = [(own if len(at) == 1 else place(follow(own, at[:-1]), at[-1]), at[-1]) for at in places]
        self.where = [table for table, _ in self.slots], [key for _, key in self.slots]
        self.is_told = "requires_grad" not in asks and all(type(table) is dict for table, _ in self.slots)
        self.kinds: list[type] = []  # as they were when they were last looked at one by one
        super().__init__(thing)

    def look(self, thing: Any) -> list[_Kind]:
        """The classes, whether each wants a gradient, and layouts, in the order of the places; `NoneType` where nothing stands."""
        exact, flags, sparse = ("class" in self.asks, "requires_grad" in self.asks, "sparse" in self.asks)
        found: list[_Kind] = []
        for table, key in self.slots:
            t = _standing(table, key)
            tensor = is_a(t, torch.Tensor)
            kind = torch.Tensor if tensor and not exact else type(t)
            found.append((kind, tensor and flags and t.requires_grad, t.layout if tensor and sparse else torch.strided))
        return found

    def words(self, held: list[_Kind]) -> str:
        """Those that are not alike in the two."""
        other = self.look(self.thing) if held is self.held else self.held
        told = [
            f"{at[0]}{''.join(map(shown, at[1:]))} = {_named(*is_so)}"
            for at, is_so, now in zip(self.places, held, other, strict=True)
            if is_so != now
        ]
        return ", ".join(told[:4]) or "none besides"

    def rests_on(self) -> list[dict[str, Any]]:
        """The dicts in which they stand."""
        return [table for table, _ in self.slots if type(table) is dict]

    def asked(self) -> bool:
        """Whether they are the same, for a call."""
        if self.is_told:
            return super().asked()
        try:
            kinds = [*map(type, map(getitem, *self.where))]
        except (LookupError, AttributeError, TypeError):  # one is gone
            return False
        if kinds == self.kinds and self.asks.isdisjoint(("requires_grad", "sparse")):
            return True
        if not self.is_same():
            return False
        self.kinds = kinds
        return True

    def anew(self, thing: Any) -> Kept:
        """The same of another module."""
        return type(self)(thing, self.places, self.asks)


def _named(kind: type, wants_gradient: bool, layout: torch.layout) -> str:
    how = f" of layout {layout}" if layout is not torch.strided else ""
    wanting = " that requires a gradient" if wants_gradient else ""
    return "None" if kind is type(None) else f"a {kind.__qualname__}{how}{wanting}"


def _standing(table: Any, key: Any) -> Any:
    try:
        return table[key]
    except (LookupError, AttributeError, TypeError):
        return None


def _tables_of(module: Any) -> tuple[dict[str, Any], ...]:
    own = module.__dict__
    return own, own["_parameters"], own["_buffers"], own["_modules"]


def tabled(module: nn.Module) -> tuple[list[str], list[str]]:
    """The names of a module's own parameters, and of its buffers."""
    return [*module._parameters], [*module._buffers]


class Tabled(OfTables):
    """The names of a module's own parameters and of its buffers, in their order, as they `were` when forward went through them."""

    __slots__ = ()

    def __init__(self, thing: nn.Module, were: tuple[list[str], list[str]]) -> None:
        super().__init__(thing)
        self.held = were

    def look(self, thing: Any) -> tuple[list[str], list[str]]:
        """Those of both tables."""
        return tabled(thing)

    def rests_on(self) -> tuple[dict[str, Any], ...]:
        """The two tables, as they stand now."""
        return self.thing._parameters, self.thing._buffers

    def asks_as(self, other: Kept) -> bool:
        """Whether that looks through the same module's names."""
        return isinstance(other, Tabled) and other.thing is self.thing and bool(other.held == self.held)

    def words(self, held: tuple[list[str], list[str]]) -> str:
        """All of them."""
        return ", ".join(name for names in held for name in names)


class Listed(OfTables):
    """The names of a module's own attributes, parameters, buffers and parts, which forward looked through.

    Those that forward itself sets or takes away are `ignored`.
    """

    __slots__ = ("ignored",)

    def __init__(self, thing: nn.Module, ignored: Collection[str]) -> None:
        self.ignored = BOOKKEEPING.union(ignored)
        super().__init__(thing)

    def look(self, thing: Any) -> list[str]:
        """In their order, in which forward may have gone through them."""
        return [name for table in _tables_of(thing) for name in table if name not in self.ignored]

    def rests_on(self) -> tuple[dict[str, Any], ...]:
        """The module's own, as they stand now."""
        return _tables_of(self.thing)

    def asks_as(self, other: Kept) -> bool:
        """Whether that looks through the same module's names."""
        if not isinstance(other, Listed) or other.thing is not self.thing or other.ignored != self.ignored:
            return False
        return bool(other.held == self.held)

    def words(self, held: list[str]) -> str:
        """Those that are not alike in the two."""
        return told_apart(held, self.look(self.thing) if held is self.held else self.held)

    def anew(self, thing: Any) -> Kept:
        """The same of another module."""
        return type(self)(thing, self.ignored)
