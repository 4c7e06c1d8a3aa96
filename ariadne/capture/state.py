"""Leaving things as found: what a forward may move is noted before it runs, and put back after."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from operator import is_not
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from ariadne.capture import generators
from ariadne.capture.context import changed_variables
from ariadne.capture.copies import Copy
from ariadne.capture.raw import Raw, lender
from ariadne.guards import (
    LEAVES,
    MISSING,
    Given,
    Memories,
    Reached,
    Slots,
    contents_of,
    follow,
    held,
    is_a,
    is_opaque,
    is_raw,
    lasts,
    outside_of,
    own_dict,
    own_of,
    refill,
    slot_of,
    slots_of,
    strays,
    switches,
    variables,
)
from ariadne.plan import Groups, TracePlan


def _changed(now: list[Any], was: list[Any]) -> bool:
    return len(now) != len(was) or any(map(is_not, now, was))


def _moved(d: dict[Any, Any], old: dict[Any, Any]) -> bool:
    """Whether a dict holds other things than it did."""
    if not old:  # most are attributes of functions that have none
        return dict.__len__(d) > 0
    return dict.__len__(d) != len(old) or any(dict.get(d, k, d) is not v for k, v in old.items())


def _reordered(d: dict[Any, Any], old: dict[Any, Any]) -> bool:
    """Whether a dict that holds what it did has it in another order."""
    return any(map(is_not, (OrderedDict if is_a(d, OrderedDict) else dict).__iter__(d), old))


def _by_key(holder: Any, names: Iterable[str]) -> dict[Any, Any]:
    """What a container holds now, by key or position; of an object what these attributes are."""
    if is_a(holder, Slots):
        return {name: slot_of(holder.thing, name) for name in names}
    now = contents_of(holder)
    return now if is_a(now, dict) else dict(enumerate(now))


def _holds_tensors(module: nn.Module | None) -> bool:
    return module is not None and any(m._parameters or m._buffers for m in module.modules())


_PLAIN = LEAVES - {FunctionType}  # nothing can be noted of these
Spot = tuple[int, Any]  # the id of a container, and a key of it; None for all of it


class Snapshot:
    """A model's Python state and every RNG at one moment; tensors are added as something is about to write them.

    Covers each module's attributes, the lists, deques, dicts, sets, numpy arrays and objects that these hold, and the
    registries of parameters, buffers, submodules and hooks; and what forward's functions reach outside: variables, attributes of
    classes and functions, caches. `restore` puts all of it back: of tensors their data, and that no graph led to them. So it does
    with what `others` hold, which are not the model's.
    """

    def __init__(self, model: nn.Module, others: Iterable[Any] = (), outside: Reached | None = None) -> None:
        """`outside`: what the model's functions reach outside of it, if that is known already."""
        self.rng, self._switches = generators.states(), switches.settings()
        self.modules = dict(model.named_modules())
        outside = outside_of(self.modules) if outside is None else outside
        self._taken = model, others, outside
        self.given, self.outside = others, outside
        self._context = copy_context()
        self.inside: set[Spot] = set()  # what parts that are taken as they are changed by themselves
        self.draws_inside: set[str] = set()  # those of Python's own generators that one of them drew from
        self.memories = Memories(outside.memories)
        self.strays = strays(self.modules)
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._by_id: tuple[int, dict[int, dict[Any, Any]]] = 0, {}  # what these held, and how many of them are in it
        self._lists: list[tuple[Any, list[Any]]] = []  # and deques
        self._arrays: list[Raw] = []
        self._slots: list[tuple[Slots, dict[str, Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._saved: dict[int, Copy] = {}
        self.written = set[int]()  # the model's memory that ops wrote in this run
        self.marks: list[
            tuple[torch.Tensor, dict[str, Any]]
        ] = []  # the model's tensors, and those that variables outside of it hold, and what Python has set on them
        self._owners: dict[int, list[torch.Tensor]] = {}
        self._generators: list[tuple[Callable[[Any], Any], Any]] = []
        self._own_rng: list[tuple[Any, Callable[[], Any], Callable[[Any], Any], Any]] = []
        self._seen = {id(m) for m in (*self.modules.values(), *self.strays.values())}
        self._attributes = {id(m.__dict__) for m in (*self.modules.values(), *self.strays.values())}
        for module in (*self.modules.values(), *self.strays.values()):
            self._note(module.__dict__)
        tables = [old for _, old in self._dicts] + [dict(enumerate(was)) for _, was in self._lists]
        own = {id(v): v for table in tables for v in table.values() if issubclass(type(v), torch.Tensor)}
        trained, beside = {id(p): p for p in model.parameters()}, (*own.values(), *outside.tensors, *outside.parts)
        trained |= {id(t): t for t in beside if t.is_leaf and t.requires_grad}  # in plain lists, and outside
        self._parameters = [(p, p.data, p.grad, p.requires_grad) for p in trained.values()]
        for t in own.values():
            if t.layout is torch.strided and not t.is_meta:
                self._owners.setdefault(t.untyped_storage()._cdata, []).append(t)
            self._mark(t)
        self._held = {*self._seen}
        for t in {id(t): t for t in (*outside.tensors, *outside.parts) if id(t) not in own}.values():
            self._mark(t)
        self._variables: list[tuple[Any, Collection[str], dict[str, Any]]] = []
        self.note(others)
        self.note(root.now() for root in outside.moving)
        for root in outside.roots:
            if root.names:
                self.note_variables(root.thing, root.names)
            elif root.is_empty():
                self._note_empty(root.thing)
            elif (held := root.now()) is not MISSING:
                self.note([held])

    def _mark(self, t: torch.Tensor) -> None:
        """Note what Python has set on a tensor."""
        self.marks.append((t, dict(vars(t))))
        self._attributes.add(id(vars(t)))
        self._note(vars(t))

    def anew(self) -> Snapshot:
        """All that it covers as it is now."""
        return Snapshot(*self._taken)

    def is_inside(self, thing: Any, key: Any = None) -> bool:
        """Whether a container, or what stands at a key of it, is changed by a part that is taken as it is."""
        return bool(self.inside) and ((id(thing), None) in self.inside or (id(thing), key) in self.inside)

    def spots(self, by_key: bool = False) -> set[Spot]:
        """All that stands otherwise now: of objects and modules by attribute, other containers as a whole; dicts `by_key`, too."""
        found: set[Spot] = set()
        for d, old in self._dicts:
            if _moved(d, old):
                keys = {k for k in (*old, *dict.keys(d)) if old.get(k, MISSING) is not dict.get(d, k, MISSING)}
                found |= {(id(d), k) for k in keys} if by_key or id(d) in self._attributes else {(id(d), None)}
        found |= {(id(values), None) for values, was in self._lists if _changed(contents_of(values), was)}
        found |= {(id(s), None) for s, before in self._sets if set.__ne__(s, before)}
        found |= {(id(raw.thing), None) for raw in self._arrays if raw.moved()}
        found |= {(id(variable), None) for variable in changed_variables(self._context)}
        for slots, names in self._slots:
            found |= {(id(slots.thing), n) for n, was in names.items() if slot_of(slots.thing, n) is not was}
        for thing, known, then in self._variables:
            now = variables(thing, known)
            found |= {(id(thing), n) for n in {**then, **now} if then.get(n, MISSING) is not now.get(n, MISSING)}
        found |= {(id(one), None) for one, get, _, was in self._own_rng if repr(get()) != repr(was)}
        return found

    def note_stray(self, path: str, module: nn.Module) -> None:
        """Note a module that stands in no registry, and that forward comes upon as it runs."""
        self.strays[path] = module
        self._seen.add(id(module))
        self._attributes.add(id(module.__dict__))
        self._note(module.__dict__)
        known = {id(t) for t, _ in self.marks}
        for t in (*module._parameters.values(), *module._buffers.values()):
            if t is not None and id(t) not in known:
                self._mark(t)

    def note(self, others: Iterable[Any]) -> None:
        """Note what others hold, which are not the model's."""
        for thing in others:
            self._note(thing)

    def _note_empty(self, table: dict[Any, Any]) -> None:
        """Note a dict that holds nothing, as `_note` does."""
        if id(table) not in self._seen:
            self._seen.add(id(table))
            self._dicts.append((table, {}))

    def _note(self, thing: Any) -> None:
        """Note a dict of attributes, and all that is held by what it holds."""
        todo, seen = [thing], self._seen
        while todo:
            value = todo.pop()
            kind = type(value)
            if kind in (dict, OrderedDict):  # most of all that a model keeps: its registries
                if id(value) not in seen:
                    seen.add(id(value))
                    self._dicts.append((value, dict(value)))
                    todo += [v for v in value.values() if type(v) not in _PLAIN]
                continue
            if kind is FunctionType and id(value) not in seen:
                seen.add(id(value))
                self._dicts.append((value.__dict__, dict(value.__dict__)))
                self._attributes.add(id(value.__dict__))
            if kind in LEAVES:
                continue
            if kind is memoryview:
                todo.append(lender(value))
                continue
            raw = is_raw(value)
            if self._draws(value) or id(value) in seen or (not raw and is_opaque(value)):
                continue
            seen.add(id(value))
            own = own_of(value)
            if issubclass(kind, dict):
                self._dicts.append((value, contents_of(value)))
            elif issubclass(kind, (list, deque)):
                self._lists.append((value, contents_of(value)))
            elif issubclass(kind, set):
                self._sets.append((value, {*set.__iter__(value)}))
            elif raw:
                self._arrays.append(Raw(value))
            if not issubclass(kind, (tuple, frozenset)) and (slots := slots_of(value)):
                self._slots.append((Slots(value), {name: slot_of(value, name) for name in slots}))
            if own is not None and own is not value and id(own) not in seen:
                seen.add(id(own))
                self._attributes.add(id(own))
                self._dicts.append((own, dict(own)))
            todo += [child for _, child in held(value)]

    def _draws(self, value: Any) -> bool:
        """Whether a value is a generator of random numbers; if so, note where it stands."""
        if issubclass(type(value), torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif (own := generators.of_python(value)) is not None:
            self._own_rng.append((value, *own))
        else:
            return False
        return True

    def own_generators(self) -> list[torch.Generator]:
        """Those of torch's that the model holds."""
        return [g for put, _ in self._generators if isinstance(g := getattr(put, "__self__", None), torch.Generator)]

    def note_variables(self, thing: Any, names: Collection[str]) -> None:
        """Note the globals of these names in a dict, the attributes of a class, or what a cell holds."""
        self._variables.append((thing, names, variables(thing, names)))

    def storages(self) -> set[int]:
        """What tells the memory of parameters and buffers, and of other tensors that dicts and lists hold, from that of others."""
        return set(self._owners)

    def kept_memory(self) -> set[int]:
        """The memory of all tensors that Python holds, those in tuples, slots and variables too."""
        return {t.untyped_storage()._cdata for t in self._kept()}

    def _kept(self) -> Iterator[torch.Tensor]:
        """The tensors that Python holds."""
        todo = list[Any]()
        for table, _ in self._dicts:
            todo += dict.values(table)
        for values, _ in self._lists:
            todo += contents_of(values)
        for slots, names in self._slots:
            todo += [slot_of(slots.thing, n) for n in names]
        for thing, known, _ in self._variables:
            todo += variables(thing, known).values()
        while todo:
            one = todo.pop()
            if is_a(one, torch.Tensor):
                if one.layout is torch.strided and not one.is_meta:
                    yield one
            elif is_a(one, (tuple, frozenset)):
                todo += one

    def replace(self, standing: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Wherever a tensor stands in what was noted, have what `standing` gives for it stand there; `restore` ends that."""

        def instead(value: Any) -> Any:
            if is_a(value, torch.Tensor):
                return standing(value)
            parts = tuple(map(instead, value)) if type(value) is tuple else ()
            return parts if any(map(is_not, parts, value if parts else ())) else value

        for d, _ in self._dicts:
            if _moved(d, found := {k: instead(v) for k, v in dict.items(d)}):
                refill(d, found)
        for values, _ in self._lists:
            if _changed(contents_of(values), found_values := [*map(instead, contents_of(values))]):
                refill(values, found_values)
        attributes = ((s, {n: slot_of(s.thing, n) for n in names}) for s, names in self._slots)
        outside = ((t if is_a(t, dict) else Slots(t), variables(t, names)) for t, names, _ in self._variables)
        for table, known in (*attributes, *outside):
            for name, value in known.items():
                if (now := instead(value)) is not value:
                    table[name] = now

    def all_tensors(self) -> list[torch.Tensor]:
        """All of the model's tensors that it knows."""
        return [t for owners in self._owners.values() for t in owners]

    def owning(self, memory: Collection[int]) -> Iterator[torch.Tensor]:
        """The model's tensors whose memory this is."""
        for key in memory:
            yield from self._owners.get(key, ())

    def holds(self, thing: Any) -> bool:
        """Whether a thing is a module, or one of the objects and containers that modules held at that moment."""
        return id(thing) in self._held

    def save(self, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor, the first time it is about to be written."""
        if id(tensor) not in self._saved:
            self._saved[id(tensor)] = Copy.of(tensor)

    def note_written(self, memory: int | None) -> None:
        """An op writes into this memory."""
        if memory in self._owners:
            self.written.add(memory)

    def copies(self) -> list[Copy]:
        """The copies that it keeps of the model's own tensors."""
        own = {id(t) for t in self.all_tensors()}
        return [copy for at, copy in self._saved.items() if at in own]

    def save_owners(self, written: torch.Tensor) -> None:
        """Keep copies of all state that shares memory with a tensor about to be written."""
        if written.layout is torch.strided:
            for owner in self._owners.get(written.untyped_storage()._cdata, ()):
                self.save(owner)

    def save_buffers(self) -> None:
        """Keep a copy of every buffer."""
        for module in self.modules.values():
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.save(buffer)

    def save_all(self) -> None:
        """Keep a copy of every tensor that Python holds: for a forward of which nobody knows what it writes."""
        for owners in self._owners.values():
            for tensor in owners:
                self.save(tensor)
        for tensor in (*self._kept(), *self._taken[2].parts):
            self.save(tensor)
        self.save_outside()

    def save_outside(self) -> None:
        """Keep a copy of every tensor that a variable outside of the model holds, but for those of modules."""
        for tensor in self._taken[2].tensors:
            self.save(tensor)

    def moved_rng(self, then: Mapping[str, Any] | None = None) -> list[str]:
        """Which of Python's own generators moved since, or since they stood as they did `then`: `random`, `numpy.random`."""
        return generators.moved_of_python(self.rng if then is None else then)

    def save_written(self, plan: TracePlan) -> None:
        """Keep a copy of all state that a plan writes."""
        self.save_buffers()
        groups = Groups(plan)
        written = {groups.find(w) for node in plan.nodes for w in node.writes}
        for name, value in plan.values.items():
            if value.is_state and value.kind != "buffer" and groups.find(name) in written:
                found: Any = self.modules[value.origin[0]]
                found = getattr(found, value.origin[1])
                for key in value.origin[2:]:
                    found = getattr(found, key[1]) if isinstance(key, tuple) and key[0] == "." else found[key]
                self.save(found)
        for name, tensor in plan.constants.items():  # of modules that stand in no registry, for one
            if name in groups.parent and groups.find(name) in written:
                self.save(tensor)
        self.note(given.thing if is_a(given, Given) else given for given in plan.given.values())
        for store in plan.stores:
            if store.table == "outside":
                holder = follow(plan.objects[store.path], store.container)
                if store.container or not store.steps:
                    self.note([holder])
                elif is_a(holder, (dict, type, CellType)):  # variables
                    self.note_variables(holder, store.steps)
                else:
                    self.note([holder])

    def again(self, drew: generators.Names = generators.ALL) -> None:
        """Put back buffers, tensors' data and torch's generators, and leave what Python keeps as it is now, but for what parts do
        that are taken as they are.

        Generators of the process are left where they are unless forward `drew` from them: then only another thread can have.
        """
        registries = {id(table) for m in self.modules.values() for table in (m._parameters, m._buffers)}
        for d, old in self._dicts:
            if id(d) in registries and any(d.get(k, d) is not v for k, v in old.items()):
                d.update(old)
        self._restore_tensors()
        self.written.clear()
        if self.inside:
            self._put_back(self.is_inside)
        generators.put_back(self.rng, {generators.TORCH, *self.draws_inside}.intersection(drew))
        for put, state in self._generators:
            put(state)

    def changed_containers(self) -> Iterator[tuple[int, Any, Any]]:
        """The lists, dicts, sets, arrays and objects that hold other things now, by id, with those that they held and hold.

        The registries of modules are left out.
        """
        tables = {id(t) for m in self.modules.values() for t in (m.__dict__, m._parameters, m._buffers, m._modules)}
        for d, old in self._dicts:
            if id(d) not in tables and _moved(d, old):
                lost = [v for k, v in old.items() if dict.get(d, k, d) is not v and not self.is_inside(d, k)]
                new = [v for k, v in dict.items(d) if old.get(k, d) is not v and not self.is_inside(d, k)]
                if lost or new:
                    yield id(d), lost, new
        for values, was in self._lists:
            if _changed(now := contents_of(values), was) and not self.is_inside(values):
                yield id(values), list(was), now
        for s, before in self._sets:
            if set.__ne__(s, before) and not self.is_inside(s):
                yield id(s), list(before), list(s)
        for raw in self._arrays:
            if raw.moved() and not self.is_inside(raw.thing):
                yield id(raw.thing), *raw.values()
        for slots, names in self._slots:
            moved = [
                (was, now) for n, was in names.items()
                if (now := slot_of(slots.thing, n)) is not was and not self.is_inside(slots.thing, n)
            ]  # fmt: skip
            if moved:
                yield id(slots.thing), [was for was, _ in moved], [now for _, now in moved]

    def standing(self) -> Iterator[tuple[int, set[Any]]]:
        """Of the dicts that hold other things now, by id, the keys at which they hold what they held."""
        return (
            (id(d), {k for k, v in old.items() if dict.get(d, k, d) is v}) for d, old in self._dicts if _moved(d, old)
        )

    def changed_arrays(self) -> Iterator[Any]:
        """The arrays and bytearrays in which other data are now."""
        return (raw.thing for raw in self._arrays if raw.moved() and not self.is_inside(raw.thing))

    def changed_context(self) -> Iterator[ContextVar[Any]]:
        """The context variables that stand otherwise now."""
        return (variable for variable in changed_variables(self._context) if not self.is_inside(variable))

    def changed_classes(self) -> Iterator[int]:
        """The dicts of the classes of which an attribute stands for another now, by id."""
        for thing, names, was in self._variables:
            if is_a(thing, type) and _moved(variables(thing, names), was):
                yield id(own_dict(thing))

    def moved(self) -> bool:
        """Whether a container holds other things now, or a variable stands for another."""
        variables_moved = (_moved(variables(thing, names), was) for thing, names, was in self._variables)
        return any(variables_moved) or next(self.changed_containers(), None) is not None

    def filled_by_default(self) -> Iterator[tuple[int, dict[Any, Any]]]:
        """What plain values stand for keys that a dict was asked for in vain and then put there itself, by its id."""
        for d, old in self._dicts:
            if hasattr(type(d), "__missing__") and dict.__len__(d) != len(old):
                yield id(d), {k: v for k, v in dict.items(d) if k not in old and lasts(v)}

    def lengths(self) -> tuple[list[int], list[list[Any]]]:
        """How many entries the dicts have, and what is in the lists, for `grown`."""
        return [dict.__len__(d) for d, _ in self._dicts], [contents_of(values) for values, _ in self._lists]

    def grown(self, before: tuple[list[int], list[list[Any]]]) -> set[Spot]:
        """The dicts that have another number of entries than before, and the lists that hold other things."""
        found = {(id(d), None) for n, (d, _) in zip(before[0], self._dicts, strict=False) if dict.__len__(d) != n}
        lists = zip(before[1], self._lists, strict=False)
        return found | {(id(values), None) for was, (values, _) in lists if _changed(contents_of(values), was)}

    def _held_before(self) -> dict[int, dict[Any, Any]]:
        """What the dicts held, by id."""
        if self._by_id[0] != len(self._dicts):
            self._by_id = len(self._dicts), {id(d): old for d, old in self._dicts}
        return self._by_id[1]

    def changes(self) -> Iterator[tuple[str, str, Any, Any]]:
        """The plain attributes of modules that differ now: (module path, name, before, now)."""
        before = self._held_before()
        missing = object()
        for path, module in (*self.modules.items(), *self.strays.items()):
            old = before[id(module.__dict__)]
            for name in {**old, **module.__dict__}:
                was, now = old.get(name, missing), module.__dict__.get(name, missing)
                if was is not now and not self.is_inside(module.__dict__, name):
                    yield path, name, None if was is missing else was, None if now is missing else now

    def stand_again(self, same: Mapping[int, torch.Tensor]) -> None:
        """Put back what stood where an op that had nothing to do gave it back, as `.to(device)` does: by a name of the recorder's,
        whose id `same` knows."""
        lists = [(values, dict(enumerate(was))) for values, was in self._lists]
        for holder, old in (*self._dicts, *self._slots, *lists) if same else ():
            found = _by_key(holder, old)
            for key, was in old.items():
                if is_a(was, torch.Tensor) and (now := found.get(key)) is not was and same.get(id(now)) is was:
                    holder[key] = was

    def replaced_buffers(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The buffers that forward replaced by assignment: (module path, name, the new tensor)."""
        before = self._held_before()
        for path, module in self.modules.items():
            old = before[id(module._buffers)]
            for name, now in module._buffers.items():
                if now is not None and old.get(name) is not now and not self.is_inside(module._buffers):
                    yield path, name, now

    def registered(self) -> Iterator[tuple[str, str, str]]:
        """The parameters, and the submodules with parameters or buffers, that others stand for now: (module path, name, what)."""
        before = self._held_before()
        for path, module in self.modules.items():
            for table, what in ((module._parameters, "parameter"), (module._modules, "submodule")):
                old = before.get(id(table), table)
                for name in {**old, **table}:
                    was, now = old.get(name), table.get(name)
                    if (
                        was is not now
                        and not self.is_inside(table)
                        and (what == "parameter" or _holds_tensors(was) or _holds_tensors(now))
                    ):
                        yield path, name, what

    def new_buffers(self) -> Iterator[tuple[str, str]]:
        """The buffers that are registered now and were not: (module path, name)."""
        before = self._held_before()
        for path, module in self.modules.items():
            old = before[id(module._buffers)]
            yield from (
                (path, name) for name in module._buffers if name not in old and not self.is_inside(module._buffers)
            )

    def restore(self, drew: generators.Names = generators.ALL) -> None:
        """Put everything back.

        The random generators of the process are left where they are unless the model `drew` from them: they are every thread's,
        and to rewind them would give another thread its numbers twice. Where no other thread is there, all of them are.
        """
        self._put_back(None)
        self.memories.forget()
        for p, data, gradient, flag in self._parameters:
            moved = p.layout is torch.strided and (
                p.data.untyped_storage()._cdata != data.untyped_storage()._cdata or p.shape != data.shape
            )
            if moved:
                p.data = data
            if p.grad is not gradient:
                p.grad = gradient
            if p.requires_grad != flag:
                p.requires_grad_(flag)
        switches.put_back(self._switches)
        self._restore_tensors()
        self._saved.clear()
        for put, state in self._generators:
            put(state)
        generators.put_back(self.rng, generators.ALL if drew and threading.active_count() == 1 else drew)

    def _put_back(self, only: Callable[..., bool] | None) -> None:
        """Put back what Python keeps: all of it, or `only` what this says of a container and a key of it."""
        for d, old in self._dicts:
            if not _moved(d, old):
                if old and only is None and _reordered(d, old):
                    refill(d, old)
                continue
            if only is None or only(d):
                refill(d, old)
                continue
            for key in [
                k for k in old | contents_of(d) if only(d, k) and old.get(k, MISSING) is not dict.get(d, k, MISSING)
            ]:
                if key in old:
                    d[key] = old[key]
                else:
                    del d[key]
        for values, was in self._lists:
            if (only is None or only(values)) and _changed(contents_of(values), was):
                refill(values, was)
        for s, before in self._sets:
            if (only is None or only(s)) and set.__ne__(s, before):
                refill(s, before)
        for raw in self._arrays:
            if (only is None or only(raw.thing)) and raw.moved():
                raw.put_back()
        for slots, names in self._slots:
            for name, old_value in names.items():
                if slot_of(slots.thing, name) is not old_value and (only is None or only(slots.thing, name)):
                    slots[name] = old_value
        for thing, known, then in self._variables:
            found = variables(thing, known)
            table = thing if is_a(thing, dict) else Slots(thing)
            for name in {**then, **found}:
                if only is not None and not only(thing, name):
                    continue
                if name not in then and is_a(thing, dict):
                    del thing[name]
                elif then.get(name, MISSING) is not found.get(name, MISSING):
                    table[name] = then.get(name, MISSING)
        for one, _, put, state in self._own_rng:
            if only is None or only(one):
                put(state)

    def _restore_tensors(self) -> None:
        for copy in reversed(self._saved.values()):  # of two that share memory, the first was kept first
            copy.put_back()
