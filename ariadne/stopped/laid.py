"""What stands in the tables of a model's modules, laid out anew only for those modules whose tables were written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ariadne.guards import VERSION

TABLES = ("_parameters", "_buffers")
SKIPPED = frozenset({"_modules", "_call_impl", "_compiled_call_impl", *TABLES})
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
_REGISTRIES = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict)) - SKIPPED
_HOLDS_NOTHING = PLAIN | {FunctionType, BuiltinFunctionType, MethodType, ModuleType}


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one module, with a copy of each, the hook registries, and what may hold more than itself, by where it stands."""

    own: dict[str, Any]
    members: dict[str, Any]  # its _modules
    versions: tuple[int, ...]
    copies: list[tuple[str, str, dict[str, Any], dict[str, Any]]]  # path, name of the table, it, what is in it
    registries: list[tuple[str, dict[Any, Any]]]
    holders: list[tuple[str, Any]]
    tensors: list[tuple[str, torch.Tensor]]

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Tables:
        """Those of a module that stands at `path`."""
        own = module.__dict__
        versions = _versions(own)  # first: a write in between shows
        copies = [(path, "__dict__", own, dict(own))]
        copies += [(path, table, own[table], dict(own[table])) for table in TABLES if own[table]]
        registries = [(f"{path}.{name}", value) for name, value in own.items() if name in _REGISTRIES]
        holders = [
            (f"{path}.{name}", value)
            for name, value in own.items()
            if name not in _REGISTRIES and name not in SKIPPED and type(value) not in _HOLDS_NOTHING
        ]
        tensors = [
            (f"{path}.{name}".lstrip("."), t)
            for table in (module._parameters, module._buffers, own)
            for name, t in table.items()
            if isinstance(t, torch.Tensor)
        ]
        return cls(own, own["_modules"], versions, copies, registries, holders, tensors)


class Laid:
    """The tables of all modules of one model, kept from one time to the next."""

    def __init__(self) -> None:
        self._rows: list[tuple[nn.Module, str, Tables]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Laid:
        return Laid()

    def tables(self, model: nn.Module) -> Iterator[Tables]:
        """What stands there now."""
        rows = self._rows
        if VERSION is None or not rows or rows[0][0] is not model:
            rows = [(module, path, Tables.of(path, module)) for path, module in model.named_modules()]
        else:
            now, again = [], False
            for module, path, was in rows:
                own = module.__dict__
                if own is was.own and _versions(own) == was.versions:
                    now.append((module, path, was))
                    continue
                found = Tables.of(path, module)
                again |= found.members is not was.members or found.versions[1] != was.versions[1]
                now.append((module, path, found))
            rows = now
            if again:  # there may be other modules
                rows = [(module, path, Tables.of(path, module)) for path, module in model.named_modules()]
        self._rows = rows
        return (found for _, _, found in rows)


def _versions(own: dict[str, Any]) -> tuple[int, ...]:
    if VERSION is None:
        return ()
    return VERSION(own), VERSION(own["_modules"]), *(VERSION(own[table]) for table in TABLES)
