"""What the ops of one side move outside of themselves, kept before they run, so that a call can be taken back.

A number that Python reads out of a tensor shows only in the middle of a side which path a call takes. On another path the model
would have run from the inputs, once. So what ran on the wrong one is undone: tensors written into, random numbers drawn, what
was put into buffers, attributes and containers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from operator import attrgetter, is_not
from types import CellType
from typing import Any

import torch
from torch import nn

from ariadne.capture import Call, Reach, Snapshot, is_opaque_call
from ariadne.errors import UnsupportedError, WitnessError
from ariadne.guards import MISSING, VERSION, follow, is_a, stamp
from ariadne.plan import Groups, Store, TracePlan, Value

Getter = Callable[[], Any]
Numbers = list[tuple[Callable[[Any], Any], Any]]
TABLES = {"parameter": "_parameters", "buffer": "_buffers"}
_version = attrgetter("_version")


class Moves:
    """What the ops `start` to `stop` of a plan move, and these stores of it: known once, kept at each call by `keep`."""

    def __init__(self, plan: TracePlan, start: int, stop: int, stores: Sequence[Store], model: nn.Module) -> None:
        nodes, groups = plan.between(start, stop), Groups(plan)
        written = {groups.find(name) for node in nodes for name in node.writes if name in groups.parent}

        def is_written(name: str) -> bool:
            return name in groups.parent and groups.find(name) in written

        self._plan, self._model = plan, model
        self._given = [i for i, (_, name) in enumerate(plan.inputs) if is_written(name)]
        self._tensors = [getter(v, model) for v in plan.values.values() if v.is_state and is_written(v.name)]
        self._tensors += [partial(plan.constants.__getitem__, name) for name in plan.constants if is_written(name)]
        read = [plan.values[r] for r in dict.fromkeys(r for n in nodes for r in n.reads) if r in plan.values]
        in_tables = [v for v in read if v.kind in TABLES and len(v.origin) == 2]
        self._read_tables = [getattr(model.get_submodule(v.origin[0]), TABLES[v.kind]) for v in in_tables]
        self._read_keys = [v.origin[1] for v in in_tables]
        reads = [getter(v, model) for v in read if v.is_state and not (v.kind in TABLES and len(v.origin) == 2)]
        self._getters = [*reads, *self._tensors]
        self._looked_up = [*{id(table): table for table in self._read_tables}.values()]
        # Versions of these tables, and what stood there in them: the same list as long as nothing was put there.
        self._stood: tuple[int, list[Any]] = -1, []
        self._draws = any(node.seeded for node in nodes)
        calls = [plan.objects[r] for node in nodes if is_opaque_call(node) for r in node.reads if r in plan.objects]
        # Whether an opaque part changes something there.
        self.python = any(is_a(thing, Call) and thing.moves for thing in calls)
        self._reach = Reach(model) if self.python else None
        self._generators = [thing for thing in plan.objects.values() if is_a(thing, torch.Generator)]
        self._slots = [
            (getattr(model.get_submodule(s.path), s.table), s.name)
            for s in stores
            if s.table in ("_buffers", "__dict__")
        ]
        self._inside = [s for s in stores if s.inside]
        where = self._given, self._tensors, self._draws, self._generators, self._slots, self._inside, self.python
        self.nothing = not any(where)  # that they move
        self.writes = bool(self._tensors or self._given)  # into tensors that outlive the call

    def keep(self, given: Sequence[Any], call: Any = None) -> Kept:
        """What stands there now. `given`: the inputs of the side, where it has the model's; `call`: its (args, kwargs)."""
        kept = Kept()
        if self.nothing:
            return kept
        tensors = [*(get() for get in self._tensors), *(given[i] for i in self._given)]
        kept.tensors = [(t, _copied(t), t.grad_fn) for t in {id(t): t for t in tensors}.values()]
        kept.numbers = numbers(self._generators, self.python) if self._draws or self._generators else []
        kept.slots = [(table, key, table.get(key, MISSING)) for table, key in self._slots]
        kept.snapshot = self._noted(call) if self._reach is None else self._reach.snapshot(call, None)
        return kept

    def _noted(self, call: Any) -> Snapshot | None:
        """What stands in the containers that these stores go into, if there are any."""
        if not self._inside:
            return None
        snapshot = Snapshot(nn.Module())
        for store in self._inside:
            self._note(store, snapshot, call)
        return snapshot

    def _note(self, store: Store, snapshot: Snapshot, call: Any) -> None:
        if store.table == "outside":
            start: Any = self._plan.objects[store.path]
            if not store.container and store.steps and is_a(start, (dict, type, CellType)):
                snapshot.note_variables(start, store.steps)
                return
        else:
            start = call if store.table == "input" else self._model.get_submodule(store.path).__dict__
        steps = store.container
        while True:  # a container that is not there yet is put there before, into one that is
            try:
                snapshot.note([follow(start, steps)])
                return
            except (LookupError, AttributeError, TypeError):
                steps = steps[:-1]

    def seen(self, given: Sequence[Any], call: Any) -> Seen:
        """What stands now where the ops read or move something: inputs, state, and what they store into."""
        total = stamp(self._looked_up)  # first: a write in between shows
        known, state = self._stood
        if total != known or VERSION is None:
            state = [*map(dict.get, self._read_tables, self._read_keys)]
            self._stood = total, state
        tensors = [*given]
        if self._getters:
            tensors += [get() for get in self._getters]
        try:
            versions, written = [*map(_version, tensors)], sum(map(_version, state))
        except (RuntimeError, AttributeError):  # a tensor of inference mode has none, and what is no tensor
            tensors = [t for t in (*tensors, *state) if isinstance(t, torch.Tensor)]
            versions, written, state = [0 if t.is_inference() else t._version for t in tensors], 0, []
        if self._slots:
            tensors += [table.get(key) for table, key in self._slots]
        return Seen(tensors, state, versions, written, self._noted(call) if self._inside else None)


class Seen:
    """Things and tensors of the model's state, how often these were written into, and containers.

    They are held, so none takes another's place. `written` is a sum: what is written into only counts up.
    """

    __slots__ = ("inside", "state", "things", "versions", "written")

    def __init__(
        self, things: list[Any], state: list[Any], versions: list[int], written: int, inside: Snapshot | None
    ) -> None:
        self.things, self.state, self.versions, self.written, self.inside = things, state, versions, written, inside

    def stands(self, now: Seen) -> bool:
        """Whether `now`, seen later, is the same; containers are looked into."""
        for mine, theirs in ((self.things, now.things), (self.state, now.state)):
            if len(mine) != len(theirs) or any(map(is_not, mine, theirs)):
                return False
        same = self.versions == now.versions and self.written == now.written
        return same and not (self.inside is not None and self.inside.moved())


class Kept:
    """What stood where the ops of a side move something, before they ran."""

    tensors: Sequence[tuple[torch.Tensor, torch.Tensor, Any]] = ()  # each, a copy, and where its graph goes on
    numbers: Sequence[tuple[Callable[[Any], Any], Any]] = ()
    slots: Sequence[tuple[dict[str, Any], str, Any]] = ()
    snapshot: Snapshot | None = None
    older: Kept | None = None  # what was kept before, by the plan in which the call began

    def then(self, now: Kept) -> None:
        """Take what was kept later, by another plan: that is put back first, and then what this one had."""
        if self.older is not None or self.tensors or self.numbers or self.slots or self.snapshot is not None:
            now.older = copy(self)
        self.tensors, self.numbers, self.slots, self.snapshot = now.tensors, now.numbers, now.slots, now.snapshot
        self.older = now.older

    def put_back(self) -> None:
        """Put it all back; raises `WitnessError` where a tensor can't have the graph back that it had."""
        for table, key, was in self.slots:
            if was is MISSING:
                table.pop(key, None)
            else:
                table[key] = was
        if self.snapshot is not None:
            self.snapshot.restore(())
        for t, data, _ in self.tensors:
            with torch.inference_mode(t.is_inference()):
                t.data.copy_(data)
        for t, data, graph in self.tensors:
            if t.grad_fn is not graph:
                _put_back_graph(t, data)
        for put, state in self.numbers:
            put(state)
        if self.older is not None:
            self.older.put_back()


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, in its graph if it has one."""
    with torch.set_grad_enabled(t.grad_fn is not None):
        return t.clone()


def _put_back_graph(t: torch.Tensor, before: torch.Tensor) -> None:
    """Let the graph of a tensor that was written into go on from a copy made before, which leads where it did."""
    if t._is_view() or t.retains_grad:
        what = "is a view" if t._is_view() else "retains its grad"
        raise WitnessError(
            f"forward writes into a tensor {list(t.shape)} that has a graph and {what}, and then reads out of a tensor that this "
            "call takes another path, for which it would have to begin again; such a graph can't be put back. Pass a clone() of it"
        )
    t.detach_()
    if before.requires_grad:
        with torch.enable_grad():
            t.copy_(before)


def numbers(generators: Sequence[torch.Generator] = (), python: bool = False) -> Numbers:
    """The random generators of torch, these, and with `python` its own: how each is set, and its state."""
    found: Numbers = [(torch.set_rng_state, torch.get_rng_state())]
    if python:
        found.append((random.setstate, random.getstate()))
    if python and "numpy" in sys.modules:
        found.append((sys.modules["numpy"].random.set_state, sys.modules["numpy"].random.get_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return found + [(g.set_state, g.get_state()) for g in generators]


def alike(some: Numbers, others: Numbers) -> bool:
    """Whether generators stand at the same numbers."""
    flat = [[t for _, s in one for t in (s if isinstance(s, list) else [s])] for one in (some, others)]
    return len(flat[0]) == len(flat[1]) and all(map(_same, *flat))


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)


def refuse_resized(plan: TracePlan, model: nn.Module) -> None:
    """Raise `UnsupportedError` where forward gave state another size in the run that was captured, which no call does again."""
    for value in plan.values.values():
        if value.is_state and all(isinstance(size, int) for size in value.shape):
            now = getter(value, model)()
            if isinstance(now, torch.Tensor) and tuple(now.shape) != value.shape:
                path, *keys = value.origin
                raise UnsupportedError(
                    f"forward gives the {value.kind} {'.'.join((path, *map(str, keys))).lstrip('.')!r} another size, "
                    f"{list(value.shape)} where it has {list(now.shape)}, which a first call alone does. Give it its size in "
                    "__init__, or run the model once, model(*example_inputs), and prepare then"
                )


def getter(value: Value, model: nn.Module) -> Getter:
    """What gives the tensor that stands now where a value of a plan, which is state, comes from."""
    path, *keys = value.origin
    module = model.get_submodule(path)

    def get() -> Any:
        found = getattr(module, keys[0])
        for key in keys[1:]:
            found = getattr(found, key[1]) if isinstance(key, tuple) and key[0] == "." else found[key]
        return found

    return get
