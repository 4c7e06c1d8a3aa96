"""The baseline: a model's structure, flags, hooks and Python state as they were when a plan was captured."""

from __future__ import annotations

import copy
import inspect
import threading
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from ariadne.errors import ModuleError
from ariadne.guards.attributes import (
    ANY,
    BOOKKEEPING,
    MISSING,
    follow,
    is_a,
    is_followed,
    is_opaque,
    kind_of,
    own_of,
    place,
    strays,
)
from ariadne.guards.attributes import shown as shown_step
from ariadne.guards.classes import Hiding, Lookup, Nearer, changeable, own_dict, stands_in
from ariadne.guards.counted import Names, kept_of_attribute, owner_of
from ariadne.guards.first_calls import AsFilled, first_calls, leave_together
from ariadne.guards.first_calls import merged as merged_runs
from ariadne.guards.kept import Defaults, Kept, Same
from ariadne.guards.last_size import AsLast
from ariadne.guards.left import AsLeft, Site, merged
from ariadne.guards.marks import (
    ASKING_FOR_CLASSES,
    Asked,
    Classes,
    Listed,
    Marks,
    Registered,
    Strides,
    Ungraded,
    marks_on,
    state_of,
    tabled,
)
from ariadne.guards.opened import State, counts_by_which
from ariadne.guards.outside import Outside, add_to, in_class, of_kind, with_contents
from ariadne.guards.recording import Recording, flags_set
from ariadne.guards.referred import Read, references
from ariadne.guards.stood import AsStood
from ariadne.guards.ties import Tied
from ariadne.guards.whole import looked_into
from ariadne.guards.within import within
from ariadne.plan import Store, storage_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(
    getattr(nn.modules.module, name)
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)


def global_hooks() -> list[Any]:
    """The hooks for all modules that a plan would have to run: not those by which torch's own counters (`FlopCounterMode`) note
    which module runs. Under these a split counts its ops as ops of the whole.
    """
    found = (hook for hooks in GLOBAL_HOOKS for hook in hooks.values())
    return [hook for hook in found if getattr(type(getattr(hook, "__self__", None)), "__module__", "") != _TRACKER]


_TRACKER = "torch.utils.module_tracker"
_SPECIAL = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
_REGISTRIES = ("_parameters", "_buffers")
_GROWING = (nn.ModuleDict, nn.ModuleList)
_LISTING = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # whose own code goes through all parts
_THROUGH_ALL = frozenset({"apply", "_apply", ANY})  # names in forward's code by which it may do so
Facts = tuple[torch.dtype, str, tuple[int, ...]]
StateTypes = tuple[Facts, ...]


def state_types(model: nn.Module) -> StateTypes:
    """The facts of every parameter and buffer: what `.to(...)` and replacing them change."""
    return tuple(map(facts_of, (*model.parameters(), *model.buffers())))


def facts_of(t: torch.Tensor) -> Facts:
    """A tensor's dtype, device type and shape, if it has one: nested tensors have none."""
    return t.dtype, t.device.type, () if t.is_nested else tuple(t.shape)


class Baseline:
    """What guards compare a model with. `attributes`: (module path, keys, value) of plain attributes that forward read.

    The keys after the first are steps into what the attribute holds. `training` has the flags of the whole and of all modules
    but those of torch whose code names none: there it decides nothing, and a look at a module's dict costs a few cache misses.
    Nor has it those that forward sets itself.
    `followed` are modules of opaque parts, run as they are then, `foreign` those that another one's code looked at, `strays` those
    that ran and stand in no registry, `outsiders` those of them that the model does not hold at all. Nothing here belongs to one
    cut.
    """

    def __init__(
        self, model: nn.Module, recordings: Sequence[Recording] = (), leaves: Sequence[Any] = (),
        outsiders: Mapping[str, nn.Module] = types.MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.modules = dict(model.named_modules())
        ran = set[str]().union(*(recorded.used for recorded in recordings)) - self.modules.keys()
        met = {p: m for recorded in recordings for p, m in recorded.outsiders.items()}
        self.outsiders = {**outsiders, **{p: m for p, m in met.items() if p in ran}}
        held = strays(self.modules) if ran - self.outsiders.keys() else {}
        self.strays = {**{p: m for p, m in held.items() if p in ran}, **self.outsiders}
        self.ties = self._ties()
        self.modules |= self.strays
        flags = {p: m.training for p, m in self.modules.items() if not p or looks_at_its_flag(m)}
        set_by_forward = flags_set(recordings)
        self.training = {p: flag for p, flag in flags.items() if p not in set_by_forward}
        self.classes: dict[str, type] = {p: type(m) for p, m in self.modules.items()}
        self.children = {p: list(m._modules.items()) for p, m in self.modules.items()}
        self.hooks = {(p, h): list(m.__dict__[h].values()) for p, m in self.modules.items() for h in HOOKS}
        self.forwards = {p: m.__dict__.get("forward") for p, m in self.modules.items()}
        self.absent = {
            p: [(table, n) for table in _REGISTRIES for n, t in m.__dict__[table].items() if t is None]
            for p, m in self.modules.items()
        }
        self.tables = {p: (m._parameters, m._buffers) for p, m in self.modules.items()}
        self.tensors = {
            p: [(t, *item) for t in _REGISTRIES for item in m.__dict__[t].items()] for p, m in self.strays.items()
        }
        self.types = state_types(model)
        self.asks_sizes = any("shape" in recorded.looked for recorded in recordings)
        self.attributes: list[tuple[str, tuple[Any, ...], Any]] = []
        self.missing: set[tuple[str, str]] = set()
        # The names of a module's parameters and buffers, where forward looked through these.
        looked_through = {path for recorded in recordings for path in recorded.tabled}
        self.tabled = {p: tabled(m) for p, m in sorted(self.modules.items()) if p in looked_through}
        self.handed_on: set[tuple[str, str]] = (
            set()
        )  # looked for in vain, and found by a `__getattr__` of the module's own
        self.inherited: set[tuple[str, str]] = set()  # methods and the like, found in the module's class
        self.outside: list[Outside] = []
        self.flags = [flag for recorded in recordings for flag in recorded.flags]
        self.remembered = [one for recorded in recordings for one in recorded.remembered]
        self.foreign: set[str] = set()
        self.installed: set[types.CodeType] = set()  # hooks that forward itself registers, and that change no result
        looked = {id(m) for _, m in looked_into(model)}
        used = set[str]().union(*(recorded.used for recorded in recordings))
        self.followed = {p for p, m in self.modules.items() if p not in self.strays and id(m) not in looked} - used
        self.growing = self._growing(recordings)
        seen: set[tuple[Any, ...]] = set()
        names, read_tensors = Names(recordings), list[Read]()
        self._asked: Collection[int | None] = set[int | None]().union(*(recorded.asked for recorded in recordings))
        self.facts = self._facts(self._asked)
        # Of the tensors that decide, by their own sizes, sizes that forward asked of what ops made of them.
        self._deciding: Collection[int | None] = set[int | None]().union(*(r.decided_by_size for r in recordings))
        self.deciding = self._facts(self._deciding)
        for recorded in recordings:
            taken = {(path, keys[0]) for path, keys, _ in self.attributes}  # by earlier runs, the first of them real
            changed = {(path, name) for path, name, _, _ in recorded.changed}
            known = {o.place: i for i, o in enumerate(self.outside)}
            seen_outside = [*recorded.outside, *of_classes(recorded.read_attributes, recorded.registered, names)]
            found_outside: dict[Any, Outside] = {}
            for o in seen_outside:
                add_to(found_outside, o)
            for at, o in found_outside.items():
                kept = o.kept
                if at not in known and isinstance(kept, State) and not kept.is_same():
                    o = replace(o, kept=kept.again())
                if at not in known and o.is_same():
                    self.outside.append(o)
                elif (
                    at in known
                    and (first := self.outside[known[at]]).kept is None
                    and first.value is o.value
                    and o.is_same()
                ):
                    self.outside[known[at]] = o  # a later run looked into it, too
            self.foreign |= recorded.foreign
            # What forward sets up itself may be there or not; a `__getattr__` of its own may find what torch's misses.
            for path, name in recorded.missing - changed:
                module = self.modules.get(path)
                if module is not None and not hasattr(module, name):
                    self.missing.add((path, name))
                elif module is not None and not stands_in(module, name):
                    self.handed_on.add((path, name))
            hooks = (f for _, now in recorded.containers for f in now if callable(f))
            self.installed |= {f.__code__ for f in hooks if hasattr(f, "__code__")}
            for (path, name), (module, value, at) in recorded.read_attributes.items():
                if name == "training":
                    if path not in set_by_forward:
                        self.training.setdefault(path, value)
                elif at in recorded.defaults and path in self.modules:
                    put = recorded.defaults[at]
                    self.attributes.append((path, (name,), Defaults(module.__dict__.get(name, value), put)))
                elif (path, name) not in changed | taken and path in self.modules:
                    found = [] if at in recorded.moved else list(kept_of_attribute(module, name, value, names))
                    tensors = {keys: t for keys, t in found if isinstance(t, torch.Tensor)}
                    for facts, asked in ((self.facts, self._asked), (self.deciding, self._deciding)):
                        facts |= {
                            ("attribute", path, k): facts_of(t) for k, t in tensors.items() if _is_one_of(t, asked)
                        }
                    kept_ones = ((keys, k.thing if isinstance(k, Same) else k) for keys, k in found)
                    read_tensors += [(path, keys, t) for keys, t in kept_ones if is_a(t, torch.Tensor)]
                    if path in self.strays:  # which no plan follows
                        found = [(keys, Same(kept) if keys in tensors else kept) for keys, kept in found]
                        tensors = {}
                    if not found and name not in module.__dict__ and owner_of(module, name) is not None:
                        self.inherited.add((path, name))
                    for keys, kept in found:
                        # A dict may hold something under a name that is an attribute of it, too.
                        place_of_it = (path, keys, type(kept), *map(type, keys))
                        if not is_a(kept, torch.Tensor) and place_of_it not in seen:
                            seen.add(place_of_it)
                            self.attributes.append((path, keys, kept))

        for path in sorted({p for recorded in recordings for p in recorded.listed} & self.modules.keys()):
            ignored = {name for recorded in recordings for at, name, _, _ in recorded.changed if at == path}
            names_in = Listed(self.modules[path], ignored)
            self.attributes.append((path, ("the names of its attributes",), names_in))
        self.references = references(self.modules, read_tensors, self.outside)
        called = frozenset[tuple[str, str]]().union(*(recorded.called_before for recorded in recordings))
        real = [recorded.made_of for recorded in recordings if recorded.made_of is not None]
        filled = {what: [made[what] for made in real if what in made] for what in sorted({*chain.from_iterable(real)})}
        self.attributes += [
            (
                "",
                (what,),
                AsFilled(model, made, made[-1].spot.was_filled(model, called))
                if made[-1].holders is None
                else AsLast(model, merged_runs(made)),
            )
            for what, made in filled.items()
        ]
        if stood := {key: value for recorded in recordings for key, value in recorded.stood.items()}:
            self.attributes.append(("", ("what earlier calls put there",), AsStood(model, stood)))
        leave_together([v for *_, v in self.attributes if isinstance(v, AsFilled) and not v.called], len(real))
        left = merged(recorded.left for recorded in recordings)
        reads = frozenset[tuple[str, str]]().union(*(recorded.decided for recorded in recordings))
        if called:  # by the model itself, or by a split of it: what that left is known
            calls = first_calls(model)
            left = {site: one for site, one in left.items() if site in calls or not site.was_filled(model, called)}
            reads = frozenset(key for key in reads if not Site(key[0], key[1:]).was_filled(model, called))
        if left or reads:
            self.attributes.append(("", ("what a first call leaves",), AsLeft(model, left, reads)))
        self._note_classes(recordings, names)
        self._note_kinds(recordings, names)
        followed = [(p, keys, t) for p, keys, t in read_tensors if p not in self.strays and is_followed(keys)]
        self._note_marks(model, recordings, names, leaves, followed)
        if recordings:
            aside = {id(t) for t in (*(t for *_, t in followed), *model.parameters(), *model.buffers())}
            more = within((value for _, _, value in self.attributes), self.outside, names, aside)
            there = {o.place for o in self.outside}
            self.outside += [o for o in more if o.place not in there and o.is_same()]

    def _note_classes(self, recordings: Sequence[Recording], names: Names) -> None:
        """Take note of what stands in the classes of objects that the modules hold, as far as forward has names for it."""
        found: dict[type, set[str]] = {}
        for _, _, value in self.attributes:
            of_users = isinstance(value, Same) and (
                not is_opaque(value.thing) or is_a(value.thing, (type, threading.local))
            )
            if isinstance(value, Same) and of_users:
                read = names.read_of(value.thing)
                kind = value.thing if is_a(value.thing, type) else type(value.thing)
                found.setdefault(kind, set()).update(names.names if read is None else read)
        known = {o.place for o in self.outside}
        for cls, asked in found.items():
            within = in_class(cls, asked, names.assigned, names.moved)
            self.outside += [o for o in within if o.place not in known and o.is_same()]

    def _note_kinds(self, recordings: Sequence[Recording], names: Names) -> None:
        """Take note of what forward may ask of classes themselves: those of the modules, and of objects that these hold."""
        which = set[str]().union(*(recorded.looked for recorded in recordings)) & {"kinds", "names"}
        if not which:
            return
        objects = (value.thing for _, _, value in self.attributes if isinstance(value, Same))
        held_ones = (thing for thing in objects if not is_opaque(thing) and own_of(thing) is not None)
        used = set[str]().union(*(recorded.used for recorded in recordings)) & self.modules.keys()
        kinds = dict.fromkeys(type(thing) for thing in (*(self.modules[path] for path in sorted(used)), *held_ones))
        for cls in kinds:
            if next(changeable(cls), None) is not None:
                self.outside += of_kind(cls, None if names.any else names.names, names.assigned, which)

    def _note_marks(
        self, model: nn.Module, recordings: Sequence[Recording], names: Names, leaves: Sequence[Any], followed: Sequence[Read]
    ) -> None:  # fmt: skip
        """Take note of what forward asks of tensors beside their values and sizes, as it is now."""
        missed = set[tuple[str, int | None]]().union(*(recorded.marks for recorded in recordings))
        # `isinstance(t, nn.Buffer)` goes by a mark of torch's own.
        of_torch = {
            mark for name, mark in (("Buffer", "_is_buffer"), ("Parameter", "_is_param")) if name in names.names
        }
        self.mark_names = frozenset({n for n, _ in missed} | names.names | of_torch if recordings else ())
        self.marks = {i: marks_on(t, self.mark_names) for i, t in enumerate(leaves) if is_a(t, torch.Tensor)}
        asks = not ASKING_FOR_CLASSES.isdisjoint(names.names)
        self.exact = {i: type(leaves[i]) for i in self.marks} if asks else {}
        at = {key for _, key in missed if key is not None}

        def counts(t: torch.Tensor) -> bool:
            return bool(marks_on(t, self.mark_names)) or (bool(at) and storage_of(t) in at)

        tensors = [n for n, t in state_of(model) if counts(t)]
        places = {f"{p}.{shown(keys)}".lstrip("."): (p, keys) for p, keys, t in followed if counts(t)}
        if tensors or places:
            on_them = Marks(model, tensors, self.mark_names, places)
            self.attributes.append(("", ("what stands on its tensors",), on_them))
        if ungraded := set[int | None]().union(*(recorded.ungraded for recorded in recordings)):
            asked = [n for n, t in model.named_buffers(remove_duplicate=False) if storage_of(t) in ungraded]
            self.attributes.append(("", ("which of its buffers have a gradient",), Ungraded(model, asked, frozenset())))
        if any("members" in recorded.looked for recorded in recordings):
            self.attributes.append(("", ("which parameters and buffers there are",), Registered(model)))
        looked = frozenset[str]().union(*(recorded.looked for recorded in recordings))
        which = frozenset({"none", "class", "ties", "sparse"} & ({*looked, "ties"} if "members" in looked else looked))
        if self.tabled or which:
            self.attributes.append(("", ("which tensors stand where",), Asked(model, which)))
        tied = Tied(model, self._roots_of_ties(model, recordings)) if recordings else None
        if tied is not None and tied.held and ("ties" in which or tied.always):
            self.attributes.append(("", ("which tensors are one",), tied))
        self._note_found(followed, looked & {"class", "requires_grad", "sparse"})
        if any("layout" in recorded.looked for recorded in recordings):
            self.attributes.append(("", ("the strides of its tensors",), Strides(model)))

    def _note_found(self, followed: Iterable[Read], asks: frozenset[str]) -> None:
        """Take note of what kind stands where forward found tensors in attributes, and in what these hold."""
        found: dict[str, dict[Any, tuple[Any, ...]]] = {}
        for path, keys, t in followed:
            if reach(self.modules[path], keys) is t:  # not where a first call puts it
                found.setdefault(path, {})[keys, *map(type, keys)] = keys
        for path, places in found.items():
            classes = Classes(self.modules[path], [*places.values()], asks)
            self.attributes.append((path, ("what stands where forward found tensors",), classes))

    def _roots_of_ties(self, model: nn.Module, recordings: Sequence[Recording]) -> Iterable[tuple[str, str] | Outside]:
        """What forward read that may hold tensors, and that it does not change itself."""
        named = dict(model.named_modules())
        moved = set[int | None]().union(*(recorded.moved for recorded in recordings))
        changed = {(path, name) for recorded in recordings for path, name, _, _ in recorded.changed}
        read = {place: value for recorded in recordings for place, (_, value, _) in recorded.read_attributes.items()}
        for (path, name), value in read.items():
            own = named[path].__dict__ if path in named and name not in BOOKKEEPING else {}
            if name in own and (path, name) not in changed and id(value) not in moved and not is_a(value, nn.Module):
                yield path, name
        yield from (o for o in self.outside if id(o.value) not in moved and not is_a(o.table, Lookup))

    def _growing(self, recordings: Sequence[Recording]) -> frozenset[str]:
        """The modules to which others may be added: of their parts forward asks for none but by its name."""
        looked = set[str]().union(*(recorded.looked for recorded in recordings))
        listed = set[str]().union(*(recorded.listed for recorded in recordings))
        names = set[str]().union(*(recorded.names for recorded in recordings))
        if not recordings or "members" in looked or not names.isdisjoint(_THROUGH_ALL):
            return frozenset()
        closed = self.tabled.keys() | listed | self.strays.keys() | self.followed
        return frozenset(p for p, m in self.modules.items() if p not in closed and not is_a(m, _LISTING))

    def is_filled_by(self, store: Store) -> bool:
        """Whether this puts a buffer where there was None."""
        return store.table == "_buffers" and (store.table, store.name) in self.absent.get(store.path, ())

    def keeps_its_children(self, path: str) -> bool:
        """Whether a module has the parts that it had; others beside them, where forward can't come to these."""
        now, was = self.modules[path]._modules, self.children[path]
        if path in self.growing and len(now) > len(was):
            return all(name in now and now[name] is module for name, module in was)
        return list(now.items()) == was

    def outdated(self) -> str:
        """What forward made for the batch of an earlier call, and goes on with though a weight has changed since, in words."""
        found = ((what, value) for _, (what, *_), value in self.attributes if isinstance(value, AsLast))
        return next((value.told(str(what)) for what, value in found if not value.is_same()), "")

    def has_more_parts(self) -> bool:
        """Whether a dict or a list of modules or parameters has those that it had, and others after them: adapters, or heads."""
        modules = [(m._modules, self.children[p]) for p, m in self.modules.items() if is_a(m, _GROWING)]
        if any(len(now) > len(was) and [*now.items()][: len(was)] == was for now, was in modules):
            return True
        return any(
            _has_more(self.modules[path], keys, was) for path, keys, was in self.attributes if path in self.modules
        )

    def keeps_its_tables(self, path: str) -> bool:
        """Whether a module's parameters and buffers stand in the dicts in which they stood, which is where a plan looks."""
        own, (parameters, buffers) = self.modules[path].__dict__, self.tables[path]
        return own["_parameters"] is parameters and own["_buffers"] is buffers

    def hooks_now(self, module: nn.Module, kind: str) -> list[Any]:
        """A module's hooks of one kind, without those that forward itself registers at its first call."""
        return [f for f in module.__dict__[kind].values() if getattr(f, "__code__", None) not in self.installed]

    def _facts(self, asked: Collection[int | None]) -> dict[tuple[str, str, tuple[Any, ...]], Facts]:
        """The types of the parameters and buffers in this memory that forward `asked` for one, by (kind, module path, names).

        A plan may rest on the type of a tensor that none of its ops reads.
        """
        return {
            (kind, path, (name,)): facts_of(t)
            for path, m in self.modules.items()
            for kind, table in (("parameter", m._parameters), ("buffer", m._buffers))
            for name, t in table.items()
            if t is not None and path not in self.strays and _is_one_of(t, asked)
        }

    def _ties(self) -> list[list[tuple[str, str, str]]]:
        """The slots (module path, table, name) that hold one and the same tensor, where more than one does."""
        homes: dict[int, list[tuple[str, str, str]]] = {}
        for path, module in self.modules.items():
            for table in _REGISTRIES:
                for name, t in module.__dict__[table].items():
                    if t is not None:
                        homes.setdefault(id(t), []).append((path, table, name))
        return [slots for slots in homes.values() if len(slots) > 1]

    def of_copy(self, copied: nn.Module, memo: Mapping[int, Any]) -> Baseline:
        """The same for a deep copy of the model: what had changed since capture counts as changed there too.

        `memo` is that of `copy.deepcopy`: copies by the ids of what they were made of.
        """
        mine = [path for path, m in self.strays.items() if path not in self.outsiders or id(m) in memo]
        if mine:
            raise ModuleError(
                f"{mine[0]!r} is a module in no registry of the model, whose tensors are part of the plan: a "
                "deep copy would compute with the original's; register it as a submodule, or prepare the copy of the model"
            )
        new = Baseline(copied, outsiders=self.outsiders)
        new.tensors = self.tensors
        old = self.modules
        new.training, new.classes, new.types = dict(self.training), {**new.classes, **self.classes}, self.types
        new.asks_sizes, new.facts, new.deciding = self.asks_sizes, self.facts, self.deciding
        new.absent = {**new.absent, **self.absent}
        new.flags = self.flags
        new.remembered = [one.of_copy() for one in self.remembered]
        new.mark_names, new.marks, new.exact = self.mark_names, self.marks, self.exact
        new.ties, new.missing, new.installed = self.ties, self.missing, self.installed
        new.handed_on = self.handed_on
        new.outside, new.foreign, new.inherited = [o.of_copy(memo) for o in self.outside], self.foreign, self.inherited
        new.followed, new.tabled, new.growing = self.followed, self.tabled, self.growing
        new.references = [one.of_copy(memo) for one in self.references]
        for path, module in old.items():
            if not self.keeps_its_children(path):
                new.children[path] = self.children[path]
            if module.__dict__.get("forward") is not self.forwards[path]:
                new.forwards[path] = self.forwards[path]
            if not self.keeps_its_tables(path):
                new.tables[path] = self.tables[path]
            for h in HOOKS:
                if self.hooks_now(module, h) != self.hooks[path, h]:
                    new.hooks[path, h] = self.hooks[path, h]
        for path, keys, value in self.attributes:
            if isinstance(value, Same | Kept) and path in new.modules:
                mine, copied_one = reach(old[path], keys), reach(new.modules[path], keys)
                if value.holds(mine) and type(copied_one) is type(mine):
                    value = value.anew(copied_one)
            new.attributes.append((path, keys, value))
        leave_together([v for *_, v in new.attributes if isinstance(v, AsFilled) and v.together])
        return new


def _has_more(module: nn.Module, keys: tuple[Any, ...], was: Any) -> bool:
    """Whether what a list or a dict of parameters tells of its length or its keys has grown."""
    if keys == ("_size",) and is_a(module, nn.ParameterList):
        return bool(module.__dict__["_size"] > was)
    if keys != ("_keys",) or not is_a(module, nn.ParameterDict) or type(was) is not dict:
        return False
    now = [*module.__dict__["_keys"]]
    return len(now) > len(was) and now[: len(was)] == [*was]


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a split's model; `ModuleError` where a module that is being copied holds the split, and is not whole yet."""
    copied = copy.deepcopy(model, memo)
    at, seen = [copied], {id(copied)}
    while at:
        tables = at.pop().__dict__
        if "_modules" not in tables:
            raise ModuleError(
                "a deep copy of a module was asked for that holds a split of its own model, which would have to be copied first; "
                "take the split off the module, and copy both together: copy.deepcopy((module, split))"
            )
        for child in tables["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                at.append(child)
    return copied


def of_classes(
    read: Mapping[tuple[str, str], tuple[nn.Module, Any, int]], registered: Iterable[tuple[type, str]],
    names: Names,
) -> Iterable[Outside]:  # fmt: skip
    """What must stay in the modules' classes: methods and properties that were used, and that nothing hides an attribute."""
    for (_, name), (module, _, _) in read.items():
        cls = type(module)
        hiding = Hiding(cls)
        if name in module.__dict__ and hiding[name] is MISSING:
            yield Outside(hiding, name, MISSING, f"{cls.__qualname__}.{name}")
        elif hasattr(type(there := Lookup(cls)[name]), "__get__"):
            yield Outside(Lookup(cls), name, there, f"{cls.__qualname__}.{name}")
    for cls in {type(module) for module, _, _ in read.values()}:
        for name in _SPECIAL:  # which Python looks for in the class alone
            yield Outside(Lookup(cls), name, Lookup(cls)[name], f"{cls.__qualname__}.{name}")
        for kind in (cls, type(cls)):  # `type(self).scale`, which the class's own class may give
            found = Lookup(kind)
            for base in changeable(kind):
                if base.__module__.partition(".")[0] != "torch":
                    for name in names.names.intersection(vars(base)) - names.assigned:
                        value = vars(base)[name]
                        own = own_dict(base)
                        hidden = (
                            next(d for d in found.dicts if name in d) is not own
                        )  # from all but `super()` and its name
                        table, what = (own, base) if hidden else (found, kind)
                        one = Outside(table, name, value, f"{what.__qualname__}.{name}")
                        if not names.moves(value):
                            if kind_of(value) == "object" and not (is_opaque(value) or counts_by_which(value)):
                                which = None if names.any else names.names
                                one = replace(one, kept=State(value, which, names.assigned, names.moved))
                            yield from with_contents(one)
                        elif not hidden:  # the plan puts things into what stands there, as long as nothing hides it
                            yield replace(one, table=Nearer(kind, name), value=MISSING)
    for cls, name in registered:
        yield Outside(Lookup(cls), name, MISSING, f"{cls.__qualname__}.{name}")


def looks_at_its_flag(module: nn.Module) -> bool:
    """Whether forward may come to depend on a module's own training flag: not where its code is torch's, and names none."""
    return "forward" in module.__dict__ or _names_its_flag(type(module))  # type: ignore[arg-type]


@cache
def _names_its_flag(cls: type) -> bool:
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        code = {n: thing for n, thing in vars(base).items() if hasattr(type(thing), "__get__")}
        if base.__module__.startswith("torch.nn."):
            if any("training" in _words(thing) for thing in code.values()):
                return True
        elif set(code) - {"__init__", "__dict__", "__weakref__"}:
            return True
    return False


def _words(thing: Any) -> set[str]:
    """The names and texts in the code of a function, a method or a property, and of functions inside."""
    if isinstance(thing, property):
        return set().union(*(_words(f) for f in (thing.fget, thing.fset, thing.fdel) if f))
    code = thing if isinstance(thing, types.CodeType) else getattr(inspect.unwrap(thing), "__code__", None)
    if code is None:
        return set()
    inner = (_words(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}.union(*inner)


def keeps_its_weights(rnn: nn.RNNBase) -> bool:
    """Whether an RNN's forward uses its parameters: those that it lists are these, or it will list them anew."""
    table = rnn.__dict__
    try:
        names, listed = table["_flat_weights_names"], table["_flat_weights"]
        registered = map(table["_parameters"].get, names)
        if len(names) == len(listed) and table.keys().isdisjoint(names) and all(map(is_, listed, registered)):
            return True  # as is usual; to ask as torch does takes 1 µs for each name
        own = [getattr(rnn, name, None) for name in names]
        return (len(listed) == len(own) and all(map(is_, listed, own))) or rnn._weights_have_changed()
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _is_one_of(t: torch.Tensor, asked: Collection[int | None]) -> bool:
    return not t.is_nested and storage_of(t) in asked


def table_of(module: nn.Module, keys: tuple[Any, ...]) -> Any:
    """What holds the last of `keys`, to be asked by `[key]`: the dict of the module or its class, or what an attribute holds."""
    own = module.__dict__
    if len(keys) == 1:
        owner = owner_of(module, keys[0])
        return own if keys[0] in own or owner is None else owner.__dict__
    return place(follow(own[keys[0]], keys[1:-1]), keys[-1])


def reach(module: nn.Module, keys: tuple[Any, ...]) -> Any:
    """What stands at `keys` now; the module itself where nothing does."""
    try:
        return table_of(module, keys)[keys[-1]]
    except (LookupError, AttributeError, TypeError):
        return module


def shown(keys: tuple[Any, ...]) -> str:
    """The keys as Python writes them: `config.scales[0]`."""
    return "".join((str(keys[0]), *map(shown_step, keys[1:])))
