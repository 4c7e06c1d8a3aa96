"""What stands in the tables of a model's modules, laid out anew only for those modules whose tables were written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, count
from operator import attrgetter, is_not, ne
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from ariadne.guards import MISSING, VERSION, bound_to

TABLES = ("_parameters", "_buffers")
CALLS = frozenset({"_call_impl", "_compiled_call_impl"})
SKIPPED = frozenset({"_modules", *CALLS, *TABLES})
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
REGISTRIES = frozenset(n for n, value in nn.Module().__dict__.items() if isinstance(value, (dict, set))) - SKIPPED
_own_of, _tensors_of, _training_of = attrgetter("__dict__"), attrgetter("tensors"), attrgetter("training")
_registries_of, _marks_of = attrgetter("registries"), attrgetter("marks")
_HOLDS_NOTHING = PLAIN | {ModuleType}
_LIBRARIES = frozenset({"torch", "numpy", *sys.stdlib_module_names})
_ACTING_LESS = PLAIN | {torch.Tensor, nn.Parameter, list, dict, set, frozenset}


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one module, with a copy of each, torch's registries, and what may hold more than itself, by where it stands."""

    own: dict[str, Any]
    copies: list[tuple[str, str, dict[str, Any], dict[str, Any]]]  # path, name of the table, it, what is in it
    registries: list[Any]
    names: list[str]  # of these
    holders: list[tuple[str, Any]]
    tensors: list[tuple[str, torch.Tensor]]
    marks: list[dict[str, Any]]  # what Python has set on each
    parts: dict[str, Any]  # a copy of its modules
    runs: tuple[Any, ...]  # what tells the code that may run for it from other code

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Tables:
        """Those of a module that stands at `path`."""
        own = module.__dict__
        copies = [(path, "__dict__", own, dict(own))]
        copies += [(path, table, own[table], dict(own[table])) for table in TABLES if own[table]]
        names = [name for name in own if name in REGISTRIES]
        registries = [own[name] for name in names]
        holders = [
            (f"{path}.{name}".lstrip("."), value)
            for name, value in own.items()
            if name not in REGISTRIES and name not in SKIPPED and not _holds_nothing(value)
        ]
        tensors = [
            (f"{path}.{name}".lstrip("."), t)
            for table in (module._parameters, module._buffers, own)
            for name, t in table.items()
            if isinstance(t, torch.Tensor)
        ]
        names = [f"{path}.{name}" for name in names]
        acting = ((name, v) for name, v in own.items() if name not in REGISTRIES and name not in SKIPPED)
        codes = ((name, code_of(v)) for name, v in acting if type(v) not in _ACTING_LESS)
        runs = ref(type(module)), *(one for one in codes if one[1])
        marks = [vars(t) for _, t in tensors]
        return cls(own, copies, registries, names, holders, tensors, marks, dict(own["_modules"]), runs)

    def registered(self) -> Iterator[tuple[dict[str, Any], str]]:
        """What came to stand in a registry or is gone from there, and modules in the place of others: in which table, the name."""
        then = {table: was for _, table, _, was in self.copies}
        for table in TABLES:
            was, now = then.get(table, {}), self.own[table]
            if was.keys() != now.keys():
                yield from ((now, name) for name in (*was, *now) if (name in was) is not (name in now))
        parts = self.own["_modules"]
        if not _same_but_calls(parts, self.parts):
            for name in dict.fromkeys((*self.parts, *parts)):
                if self.parts.get(name) is not parts.get(name):
                    yield parts, name

    def stands(self) -> bool:
        """Whether nothing stands otherwise now but what takes note of a call, which counts for nothing."""
        filled = 1 + sum(bool(self.own[table]) for table in TABLES)
        return filled == len(self.copies) and all(_same_but_calls(table, was) for _, _, table, was in self.copies)


@dataclass(slots=True)
class _Last:
    """How all stood: modules, their ids and paths; the dict of each, and its four; all of these that hold anything, with the
    numbers of their modules and whether they hold modules; those that are empty; `stood`: the tables, the dicts' versions."""

    modules: list[nn.Module]
    known: frozenset[int]
    paths: list[str]
    own: list[dict[str, Any]]
    fours: list[tuple[dict[str, Any], ...]]
    dicts: list[dict[str, Any]]
    of: list[int]
    parts: list[bool]
    empty: list[dict[str, Any]]
    stood: tuple[list[Tables], list[int]]


class Laid:
    """The tables of all modules of one model, kept from one time to the next."""

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._state: tuple[list[Any], list[tuple[str, torch.Tensor]], dict[str, torch.Tensor]] = [], [], {}
        self._flags: tuple[Any, tuple[bool, ...], frozenset[int]] = None, (), frozenset()
        self._hung: tuple[Any, list[Any], list[Any]] = (
            None,
            [],
            [],
        )  # each of these begins with the tables that it is of
        self._runs: tuple[Any, tuple[Any, ...]] = None, ()
        # A module, where those in it stand among all, and what was made of it.
        self._at: tuple[nn.Module | None, list[nn.Module], list[int]] = None, [], []
        self._made: tuple[list[Tables], Any] = [], None

    def __deepcopy__(self, memo: dict[int, Any]) -> Laid:
        return Laid()

    def tables(self, model: nn.Module) -> list[Tables]:
        """What stands there now, module by module: the same list as long as all stands as it stood."""
        last = self._last
        if VERSION is None or last is None or last.modules[0] is not model:
            return self._anew(model)
        if any(map(is_not, map(_own_of, last.modules), last.own)) or any(last.empty):
            return self._anew(model)
        known, versions = last.stood
        now = [*map(VERSION, last.dicts)]
        if now == versions:
            return known
        found = known
        for i in {last.of[at] for at in compress(count(), map(ne, now, versions))}:
            if any(map(is_not, _dicts(last.own[i]), last.fours[i])):
                return self._anew(model)
            if found[i].stands():
                continue
            if found is known:
                found = [*found]
            found[i] = Tables.of(last.paths[i], last.modules[i])
        if any(map(ne, compress(now, last.parts), compress(versions, last.parts))):
            return self._anew(model)  # there may be other modules
        last.stood = found, now
        return found

    def known(self) -> frozenset[int]:
        """The ids of the modules that were laid out last."""
        return self._last.known if self._last is not None else frozenset()

    def runs(self, found: list[Tables]) -> tuple[Any, ...]:
        """What tells the code that may run for the modules of these tables from other code."""
        if self._runs[0] is not found:
            self._runs = found, tuple([tables.runs for tables in found])
        return self._runs[1]

    def state(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a model by name, those in plain attributes too, each once."""
        return self.tensors(self.tables(model))

    def tensors(self, found: list[Tables]) -> list[tuple[str, torch.Tensor]]:
        """Those of these tables."""
        return self._told(found)[1]

    def bound(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """The tensor that stands under each name now: one that has two names under both."""
        return self._told(self.tables(model))[2]

    def hung(self, found: list[Tables]) -> tuple[list[Any], list[Any]]:
        """Torch's registries in these tables, and what Python has set on each tensor, in order."""
        known = self._hung
        if known[0] is not found:
            registries = [*chain.from_iterable(map(_registries_of, found))]
            known = self._hung = found, registries, [*chain.from_iterable(map(_marks_of, found))]
        return known[1], known[2]

    def _told(self, found: list[Tables]) -> tuple[list[Any], list[tuple[str, torch.Tensor]], dict[str, torch.Tensor]]:
        known = self._state
        if known[0] is found:
            return known
        if len(known[0]) != len(found) or any(map(is_not, map(_tensors_of, known[0]), map(_tensors_of, found))):
            every = [*chain.from_iterable(map(_tensors_of, found))]
            first: dict[int, tuple[str, torch.Tensor]] = {}
            for name, t in every:
                first.setdefault(id(t), (name, t))
            known = found, [*first.values()], dict(every)
        self._state = found, *known[1:]
        return self._state

    def training(self, model: nn.Module) -> tuple[bool, ...]:
        """Which modules are training."""
        return self._switched(model)[1]

    def averages(self, model: nn.Module) -> frozenset[int]:
        """The ids of running statistics that the model is about to write, which don't count their writes."""
        return self._switched(model)[2]

    def _switched(self, model: nn.Module) -> tuple[Any, tuple[bool, ...], frozenset[int]]:
        found, known = self.tables(model), self._flags
        if known[0] is not found:
            modules = self._last.modules if self._last is not None else []
            norms = (m for m in modules if m.training and isinstance(m, torch.nn.modules.batchnorm._NormBase))
            averages = frozenset(id(t) for m in norms for t in m._buffers.values())
            known = self._flags = found, tuple(map(_training_of, modules)), averages
        return known

    def once(self, model: nn.Module, module: nn.Module, make: Callable[[nn.Module], Any]) -> Any:
        """What `make` gives of a module of the model, made anew where that, or one in it, stood otherwise when last looked at."""
        last = self._last
        if last is None or last.modules[0] is not model:
            return make(module)
        if self._at[0] is not module or self._at[1] is not last.modules:
            inside = set(map(id, module.modules()))
            self._at = module, last.modules, [i for i, one in enumerate(last.modules) if id(one) in inside]
            self._made = [], None
        found = last.stood[0]
        now = [found[i] for i in self._at[2]]
        if not self._made[0] or any(map(is_not, now, self._made[0])):
            self._made = now, make(module)
        return self._made[1]

    def _anew(self, model: nn.Module) -> list[Tables]:
        places = [*model.named_modules()]
        modules, own = [module for _, module in places], [module.__dict__ for _, module in places]
        every = [(i, table) for i, one in enumerate(own) for table in _dicts(one)]
        dicts = [table for _, table in every if table]  # an empty one needs no version: it is empty, or is not
        versions = [*map(VERSION, dicts)] if VERSION is not None else []  # first: a write in between shows
        parts = {id(one["_modules"]) for one in own}
        found = [Tables.of(path, module) for path, module in places]
        self._last = _Last(
            modules, frozenset(map(id, modules)),
            [path for path, _ in places], own, [*map(_dicts, own)], dicts, [i for i, table in every if table],
            [id(table) in parts for table in dicts], [table for _, table in every if not table], (found, versions),
        )  # fmt: skip
        return found


def _same_but_calls(table: dict[str, Any], was: dict[str, Any]) -> bool:
    """Whether a table holds what it held, in the same order, but for how a call of the module is noticed."""
    if len(table) == len(was) and not any(map(is_not, table.values(), was.values())):
        return [*table] == [*was]
    now, then = ([(k, v) for k, v in one.items() if k not in CALLS] for one in (table, was))
    return len(now) == len(then) and all(k == j and v is w for (k, v), (j, w) in zip(now, then, strict=True))


def _holds_nothing(value: Any) -> bool:
    """Whether neither the value nor anything in it can come to hold something else."""
    kind = type(value)
    if kind is FunctionType:
        return not (vars(value) or value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    if kind is BuiltinFunctionType:
        return bound_to(value) is MISSING
    return kind in _HOLDS_NOTHING or (kind is tuple and all(map(_holds_nothing, value)))


def code_of(value: Any) -> Any:
    """What tells the code that runs for a value from that of another: a function's own, or the class. It keeps no value alive.

    Nothing does for a library's, which changes nothing of a model.
    """
    kind = type(value)
    if kind is FunctionType:
        return value.__code__
    if kind is MethodType:
        return code_of(value.__func__), code_of(value.__self__)
    if kind is partial:
        return code_of(value.func)
    if kind is tuple:
        return tuple(map(code_of, value)) if not set(map(type, value)) <= PLAIN else ()
    kind = value if isinstance(value, type) else kind
    return ref(kind) if _is_users(kind) else ()


def codes_in(found: Iterable[Any]) -> frozenset[Any]:
    """The same of all these codes and classes."""
    return frozenset(
        ref(one) if isinstance(one, type) else one for one in found if type(one) is CodeType or _is_users(one)
    )


def _is_users(kind: Any) -> bool:
    return hasattr(kind, "__exit__") or str(kind.__module__).partition(".")[0] not in _LIBRARIES


def _dicts(own: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return own, own["_modules"], own["_parameters"], own["_buffers"]
