"""Tiers: how much of the suite a run takes on, and in what time; read from `tiers.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.suite.cases import BACKENDS, KEYS, Case
from conformance.suite.supervisor import Limit

FILE = Path(__file__).parents[1].joinpath("tiers.toml")
LIMITS = {"build", "cheap", "medium", "heavy", *BACKENDS}


@dataclass(frozen=True)
class Selection:
    """Cases by check, by model (but for those excepted) and by the values of parameters; whatever is empty means all."""

    checks: frozenset[str]
    models: tuple[str, ...]
    excepted: tuple[str, ...]
    parameters: Mapping[str, frozenset[str]]

    def means(self, case: Case) -> bool:
        """Whether the case is among them; a parameter that its check doesn't vary is no hindrance."""
        return (
            (not self.checks or case.check in self.checks)
            and (not self.models or any(_prefix(pattern, case.model) for pattern in self.models))
            and not any(_prefix(pattern, case.model) for pattern in self.excepted)
            and all(
                case.get(key) is None or any(_prefix(value, case[key]) for value in values)
                for key, values in self.parameters.items()
            )
        )


def _prefix(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


@dataclass(frozen=True)
class Tier:
    """A part of the suite, and the minutes that it may take."""

    name: str
    minutes: float
    selections: tuple[Selection, ...]

    def selects(self, case: Case) -> bool:
        """Whether the case is part of this tier."""
        return any(selection.means(case) for selection in self.selections)


def load(file: Path = FILE) -> tuple[dict[str, Tier], dict[str, Limit]]:
    """The tiers by name, and the limits by what they are for; ValueError says which part of the file can't be meant."""
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    groups = data.pop("groups", {})
    limits = {name: Limit(**fields) for name, fields in data.pop("limits").items()}
    if not {"build", "cheap", "medium", "heavy"} <= limits.keys() <= LIMITS:
        raise ValueError(f"{file.name}: limits are for {sorted(LIMITS)}, not {sorted(limits)}")
    return {name: _tier(name, fields, groups, f"{file.name}: {name}") for name, fields in data.items()}, limits


def _tier(name: str, fields: Mapping[str, Any], groups: Mapping[str, list[str]], where: str) -> Tier:
    if fields.keys() != {"minutes", "select"}:
        raise ValueError(f"{where}: a tier has `minutes` and `select` tables, not {sorted(fields)}")
    return Tier(name, float(fields["minutes"]), tuple(_selection(table, groups, where) for table in fields["select"]))


def _selection(table: Mapping[str, list[str]], groups: Mapping[str, list[str]], where: str) -> Selection:
    unknown = sorted(table.keys() - {"checks", "models", "except", *KEYS})
    if unknown or not all(isinstance(values, list) and values for values in table.values()):
        raise ValueError(
            f"{where}: a table holds lists for checks, models, except and {', '.join(KEYS)}; unknown: {unknown}"
        )
    parameters = {key: frozenset(table[key]) for key in KEYS if key in table}
    models, excepted = (_members(table.get(key, ()), groups, where) for key in ("models", "except"))
    return Selection(frozenset(table.get("checks", ())), models, excepted, parameters)


def _members(names: Iterable[str], groups: Mapping[str, list[str]], where: str) -> tuple[str, ...]:
    """The names, with those of a group in place of `@group`."""
    unknown = sorted(name for name in names if name.startswith("@") and name[1:] not in groups)
    if unknown:
        raise ValueError(
            f"{where}: there is no group {unknown[0]!r}; there are {sorted('@' + name for name in groups)}"
        )
    return tuple(member for name in names for member in (groups[name[1:]] if name.startswith("@") else (name,)))
