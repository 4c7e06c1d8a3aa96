"""What stands in the tables of a model's modules, laid out anew only for those modules whose tables were written."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, count
from operator import attrgetter, is_not, ne
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.guards import VERSION

TABLES = ("_parameters", "_buffers")
SKIPPED = frozenset({"_modules", "_call_impl", "_compiled_call_impl", *TABLES})
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
_REGISTRIES = frozenset(n for n, value in nn.Module().__dict__.items() if isinstance(value, (dict, set))) - SKIPPED
_own_of = attrgetter("__dict__")
_HOLDS_NOTHING = PLAIN | {FunctionType, BuiltinFunctionType, MethodType, ModuleType}


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one module, with a copy of each, torch's registries, and what may hold more than itself, by where it stands."""

    own: dict[str, Any]
    copies: list[tuple[str, str, dict[str, Any], dict[str, Any]]]  # path, name of the table, it, what is in it
    registries: list[Any]
    names: list[str]  # of these
    holders: list[tuple[str, Any]]
    tensors: list[tuple[str, torch.Tensor]]

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Tables:
        """Those of a module that stands at `path`."""
        own = module.__dict__
        copies = [(path, "__dict__", own, dict(own))]
        copies += [(path, table, own[table], dict(own[table])) for table in TABLES if own[table]]
        names = [name for name in own if name in _REGISTRIES]
        registries = [own[name] for name in names]
        holders = [
            (f"{path}.{name}".lstrip("."), value)
            for name, value in own.items()
            if name not in _REGISTRIES and name not in SKIPPED and not _holds_nothing(value)
        ]
        tensors = [
            (f"{path}.{name}".lstrip("."), t)
            for table in (module._parameters, module._buffers, own)
            for name, t in table.items()
            if isinstance(t, torch.Tensor)
        ]
        return cls(own, copies, registries, [f"{path}.{name}" for name in names], holders, tensors)


class Laid:
    """The tables of all modules of one model, kept from one time to the next."""

    def __init__(self) -> None:
        self._last: tuple[list[nn.Module], list[str], list[Tables], list[dict[str, Any]], list[int]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Laid:
        return Laid()

    def tables(self, model: nn.Module) -> list[Tables]:
        """What stands there now, module by module."""
        if VERSION is None or self._last is None or self._last[0][0] is not model:
            return self._anew(model)
        modules, paths, found, dicts, versions = self._last
        if any(map(is_not, map(_own_of, modules), dicts[::4])):
            return self._anew(model)
        now = [*map(VERSION, dicts)]
        if now == versions:
            return found
        found, dicts = [*found], [*dicts]
        for i in {at // 4 for at in compress(count(), map(ne, now, versions))}:
            found[i], members = Tables.of(paths[i], modules[i]), dicts[4 * i + 1]
            dicts[4 * i : 4 * i + 4] = _dicts(found[i].own)
            if dicts[4 * i + 1] is not members or now[4 * i + 1] != versions[4 * i + 1]:
                return self._anew(model)  # there may be other modules
        self._last = modules, paths, found, dicts, now
        return found

    def _anew(self, model: nn.Module) -> list[Tables]:
        places = [*model.named_modules()]
        dicts = [table for _, module in places for table in _dicts(module.__dict__)]
        versions = [*map(VERSION, dicts)] if VERSION is not None else []  # first: a write in between shows
        found = [Tables.of(path, module) for path, module in places]
        self._last = [module for _, module in places], [path for path, _ in places], found, dicts, versions
        return found


def _holds_nothing(value: Any) -> bool:
    """Whether neither the value nor anything in it can come to hold something else."""
    return type(value) in _HOLDS_NOTHING or (type(value) is tuple and all(map(_holds_nothing, value)))


def _dicts(own: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return own, own["_modules"], own["_parameters"], own["_buffers"]
