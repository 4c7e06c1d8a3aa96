"""First calls: what forward makes at its first call and keeps, where a plan makes it anew in each.

Both are the same as long as what it was made of is as it was. Guards hold that against the first call since the model was
prepared, whichever plan served it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ariadne.compare import difference
from ariadne.guards.attributes import MISSING, SIMPLE, follow, is_a
from ariadne.guards.kept import Kept
from ariadne.guards.versions import VERSION
from ariadne.plan import as_bytes, storage_of

Origin = tuple[str, str, bool]  # the path of a module, the name of a tensor there, and whether memory is shared with it
Tables = list[tuple[dict[str, Any], str, bool]]  # the dict in which each stands, its name, and whether memory is shared


class Spot(NamedTuple):
    """Where a first call put something: steps from a module on, its attribute first; or a function that keeps its results."""

    path: str = ""
    steps: tuple[Any, ...] = ()
    memory: Any = None

    def now(self, model: nn.Module) -> Any:
        """What stands there; `MISSING` where nothing does, or None."""
        if self.memory is not None:
            return self.memory.cache_info().currsize or MISSING
        try:
            found = follow(model.get_submodule(self.path).__dict__, self.steps) if self.steps else MISSING
        except (LookupError, AttributeError, TypeError):
            return MISSING
        return MISSING if found is None else found

    def was_filled(self, model: nn.Module, attributes: Collection[tuple[str, str]]) -> bool:
        """Whether an earlier call, which filled these attributes, may have filled it: not where nothing stands, in none of them."""
        known = not self.steps or (self.path, self.steps[0]) in attributes
        return bool(attributes) and (known or self.now(model) is not MISSING)

    def is_empty(self, model: nn.Module) -> bool:
        """Whether it is known that nothing stands there."""
        return bool(self.steps) and self.now(model) is MISSING

    def put(self, model: nn.Module, value: Any) -> None:
        """Let something stand there, as forward does."""
        holder = self._holder(model)
        if type(holder) is dict:
            holder[self.steps[-1]] = value
        else:
            holder.append(value)

    def takes(self, model: nn.Module) -> bool:
        """Whether nothing stands there, and something can: as an attribute, in a dict, or next in a list."""
        try:
            holder = self._holder(model)
        except (LookupError, AttributeError, TypeError):
            return False
        if type(holder) is list:
            return bool(self.steps[-1] == len(holder))
        return type(holder) is dict and self.now(model) is MISSING

    def _holder(self, model: nn.Module) -> Any:
        return follow(model.get_submodule(self.path).__dict__, self.steps[:-1]) if self.steps else None


@dataclass(frozen=True)
class MadeOf:
    """The tensors of which a first call made something, and where that stands; `make` makes it of a model as it is now, if it is
    made of nothing else."""

    origins: frozenset[Origin]
    spot: Spot
    make: Callable[[nn.Module], Any] | None = field(default=None, compare=False, repr=False)
    # None, or it is kept for the batch of the last call: the attributes that hold that batch, if nothing else tells of it.
    holders: frozenset[tuple[str, str]] | None = None
    graph: bool = field(default=False, compare=False)  # whether gradients go back through it

    def asks_graph(self) -> bool:
        """Whether it has a graph where a call makes it now."""
        return self.graph and torch.is_grad_enabled()

    def tables(self, model: nn.Module) -> Tables:
        """Where these tensors stand in a model."""
        at = ((model.get_submodule(path), name, shares) for path, name, shares in sorted(self.origins))
        return [(m._parameters if name in m._parameters else m._buffers, name, shares) for m, name, shares in at]

    @property
    def words(self) -> str:
        """Their names."""
        return ", ".join(sorted({repr(f"{path}.{name}".lstrip(".")) for path, name, _ in self.origins}))


def merged(runs: Sequence[MadeOf]) -> MadeOf:
    """The last of several, with a graph where it has one in any: some runs are without gradients."""
    return replace(runs[-1], graph=any(run.graph for run in runs))


class _Seen:
    """Which tensor stood in a place, and how often it was written into; of one whose memory is shared, which memory that was.

    As long as this is kept, no other memory can come to lie at the same address.
    """

    __slots__ = ("_address", "_shares", "_storage", "_tensor", "_version")

    def __init__(self, t: torch.Tensor | None, shares: bool) -> None:
        self._shares, self._address = shares, None if t is None else storage_of(t)
        self._tensor = None if t is None else ref(t)
        self._version = 0 if t is None or t.is_inference() else t._version
        self._storage: StorageWeakRef | None = None
        if t is not None and self._address is not None:
            self._storage = StorageWeakRef(torch._C.TensorBase.untyped_storage(t))

    def is_still(self, t: torch.Tensor | None) -> bool:
        """Whether it is what stands there, unwritten."""
        if t is None or self._tensor is None:
            return t is None and self._tensor is None
        if storage_of(t) != self._address:
            return False
        if self._shares:
            return self._address is not None or self._tensor() is t
        return self._tensor() is t and (t.is_inference() or t._version == self._version)


@dataclass
class Then:
    """How such tensors were at a call: which they are and how often they were written into, and what they hold; `graph`: whether
    what it made of them has a graph."""

    at: list[_Seen]
    content: bytes
    graph: bool

    @classmethod
    def of(cls, tables: Tables, graph: bool) -> Then:
        """As they are now."""
        return cls([_Seen(table.get(name), shares) for table, name, shares in tables], _content(tables), graph)

    def stands(self, tables: Tables) -> bool:
        """Whether they are the same tensors, unwritten."""
        places = zip(self.at, tables, strict=True)
        return all(seen.is_still(table.get(name)) for seen, (table, name, _) in places)

    def holds(self, tables: Tables) -> bool:
        """Whether they are the same, or hold the same."""
        return self.stands(tables) or _content(tables) == self.content


def _content(tables: Tables) -> bytes:
    found = hashlib.blake2b()
    for table, name, shares in tables:
        t = table.get(name)
        if t is None:
            continue
        plain = not shares and t.layout is torch.strided and not t.is_quantized
        told = (t.dtype, tuple(t.shape)) if plain else (storage_of(t), shares or t._version)
        found.update(repr(told).encode())
        if plain:
            found.update(as_bytes(t).numpy())
    return found.digest()


@dataclass
class _First(Then):
    """The same at a first call; how often the dict of the module was written in which the thing stands, and what else was in it."""

    own: int
    beside: dict[str, tuple[int, Any]]


class AsFilled(Kept):
    """The tensors of a model from which forward made something at its first call, and keeps it, as was seen in one or more runs.

    They must hold what they held at the first call since the model was prepared, whichever plan served that; where it was
    `called` before, what they hold now. Where a call of the model itself has put the thing in its place since, no one knows when
    that was: then they must hold what they held when the model was prepared. Of what shares their memory, which follows what is
    written there, only that they are the same. Where the module's own `train` empties the place, a switch lets forward make the
    thing anew: while something stands there, none did.
    """

    __slots__ = ("called", "empty", "made", "own", "runs", "tables", "together")

    def __init__(self, thing: nn.Module, runs: Sequence[MadeOf], called: bool) -> None:
        self.runs, self.made, self.called = runs, merged(runs), called
        self.together: Sequence[AsFilled] = ()
        self.empty = not called and self.made.spot.now(thing) is MISSING
        self.tables = self.made.tables(thing)
        holder = thing.get_submodule(self.made.spot.path)
        train = getattr(type(holder).train, "__code__", None)
        attribute = str(self.made.spot.steps[0]) if self.made.spot.steps else ""
        clears = train is not nn.Module.train.__code__ and train is not None and attribute in train.co_names
        self.own: dict[str, Any] | None = holder.__dict__ if clears else None
        super().__init__(thing)
        self.held = replace(self.held, graph=True)  # as far as is known

    def look(self, thing: Any) -> _First:
        """As they are now."""
        now = Then.of(self.tables, self.made.asks_graph())
        return _First(now.at, now.content, now.graph, 0 if self.own is None else _writes(self.own), self._beside())

    def words(self, held: Any) -> str:
        """Their names."""
        return self.made.words

    def is_same(self) -> bool:
        """Whether they are as at the first call; where there was none, whether none of the model's own may have met others."""
        then = self._then()
        if self.lacks_graph():
            return False
        if then is None and (not self.empty or self.made.spot.now(self.thing) is MISSING):
            return True
        then = self.held if then is None else then
        return then.stands(self.tables) or self._is_emptied(then) or then.holds(self.tables)

    def asked(self) -> bool:
        """The same, for a call: where it is the first, or something was made anew, the next ones are held against it."""
        then = self._then()
        if not self.is_same():
            return False
        emptied, graph = then is not None and self._is_emptied(then), self.made.asks_graph()
        if then is not None and then.stands(self.tables):
            if emptied:  # this call makes it anew
                now = replace(then, own=_writes(self.own or {}), graph=graph)
                first_calls(self.thing)[self.made] = self.held = now
            return True
        by_itself = then is None and self.made.spot.now(self.thing) is not MISSING  # which nobody saw
        if then is None:
            self._leave()
        kept = by_itself or (then.graph if then is not None and not emptied else graph)
        first_calls(self.thing)[self.made] = self.held = replace(self.look(self.thing), graph=kept)
        return True

    def lacks_graph(self) -> bool:
        """Whether the first call made it without gradients, and this one would make it with them."""
        then = self._then()
        return then is not None and not then.graph and self.made.asks_graph() and not self._is_emptied(then)

    def _leave(self) -> None:
        """Leave on the model what its first call would have, all of it, so that it goes on with that where a weight changes."""
        if not all(one.made.spot.takes(self.thing) for one in self.together):
            return
        values = []
        for one in self.together:
            value, *others = (made.make(self.thing) for made in one.runs if made.make is not None)
            if any(difference(value, other) for other in others):  # it follows the batch
                return
            values.append(value)
        for one, value in zip(self.together, values, strict=True):
            one.made.spot.put(self.thing, value)
        for one in self.together:
            first_calls(self.thing)[one.made] = one.held = one.look(self.thing)

    def anew(self, thing: Any) -> Kept:
        """The same of a copy, which was called as often."""
        copied = type(self)(thing, self.runs, self.called or self.made in first_calls(self.thing))
        if copied.called and (then := self._then()) is not None:
            copied.held = replace(copied.held, graph=then.graph)
        if not copied.called:
            copied.empty, copied.held, copied.together = self.empty, self.held, self.together
        return copied

    def _is_emptied(self, then: _First) -> bool:
        """Whether `train` has emptied the place since, so that the next call of the model makes the thing anew, too.

        Where it was empty before, as in a model that a split alone has called, that shows in nothing but a write of the dict; of
        other attributes none may be another then, which would be a write as well.
        """
        if self.own is None or _writes(self.own) == then.own or self.made.spot.now(self.thing) is not MISSING:
            return False
        now = self._beside()
        return now.keys() == then.beside.keys() and all(now[name][0] == was for name, (was, _) in then.beside.items())

    def _beside(self) -> dict[str, tuple[int, Any]]:
        """What is in the dict but for the place itself, by id; kept so that no other gets its id, unless it may hold the model."""
        mine = {"training", str(self.made.spot.steps[0])} if self.made.spot.steps else {"training"}
        return {
            name: (id(value), value if is_a(value, (torch.Tensor, *SIMPLE)) else None)
            for name, value in (self.own or {}).items()
            if name not in mine
        }

    def _then(self) -> _First | None:
        return self.held if self.called else first_calls(self.thing).get(self.made)


def untold(filled: AsFilled) -> str:
    """That its place may have been emptied, in words, where this Python has no versions of dicts to tell by; else nothing."""
    if filled.own is None or VERSION is not None:
        return ""
    return " (under this Python no dict tells whether the model's train() has emptied that place since)"


def told_of_graph(what: str) -> str:
    """That what an earlier call made has no graph, in words."""
    return (
        f"forward made {what} in a call without gradients, and keeps it: in this call, which has gradients, none go back through "
        "it in the model, where a plan makes it anew. Let the first call be one with gradients, or let forward make it in each; or "
        "call prepare_split again"
    )


def leave_together(filled: Sequence[AsFilled], runs: int | None = None) -> None:
    """Have a first call leave all of these on the model, if each of as many runs made each of them of the model's tensors alone."""
    made = all(one.empty and all(run.make is not None for run in one.runs) for one in filled)
    together = filled if made and all(runs in (None, len(one.runs)) for one in filled) else ()
    for one in filled:
        one.together = together


def _writes(own: dict[str, Any]) -> int:
    """How often a dict was written, where this Python tells."""
    return 0 if VERSION is None else VERSION(own)


class Calls(dict[Any, Any]):
    """What is known of the first calls of a model, by what they made or left; `turn` counts what was noted, and forgotten.

    `batch`: that of the call that asks, where a guard needs it.
    """

    turn = 0
    batch: int | None = None

    def note(self, what: Any, then: Any) -> None:
        """Take it that a first call left something."""
        self[what] = then
        self.turn += 1


_CALLS: WeakKeyDictionary[nn.Module, Calls] = WeakKeyDictionary()


def first_calls(model: nn.Module) -> Calls:
    """What is known of the first calls of a model, for guards to keep."""
    found = _CALLS.get(model)
    return _CALLS.setdefault(model, Calls()) if found is None else found


def calls_of(model: nn.Module) -> dict[Any, Any]:
    """The same as it is now; see `not_called`."""
    return dict(first_calls(model))


def not_called(model: nn.Module, known: dict[Any, Any] | None = None) -> None:
    """Take it that no call has been made yet of a model that was prepared now; or those of which `known` tells."""
    calls = first_calls(model)  # which guards keep
    calls.clear()
    calls.update(known or {})
    calls.turn += 1


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within the block the model runs and is put back: what that writes into the dicts of modules is no switch of mode."""
    found = [(made.spot.path, then) for made, then in first_calls(model).items() if is_a(then, _First) and then.own]
    modules = dict(model.named_modules(remove_duplicate=False)) if found else {}
    kept = [(then, modules[path].__dict__) for path, then in found if path in modules]
    still = [(then, own) for then, own in kept if _writes(own) == then.own]
    try:
        yield
    finally:
        for then, own in still:
            then.own = _writes(own)
