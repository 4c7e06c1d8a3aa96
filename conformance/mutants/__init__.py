"""Mutants: Ariadne with one planted bug each, so that the suite can show that it would notice.

Each is a target of its own, by its name: `--target conformance.mutants:swapped_frontier`. A class of this package is a bug;
`noticed.toml` says which cases of the suite must notice it, and the exact status that each must come to.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from conformance.mutants import (
    boundaries,
    captures,
    changed,
    containers,
    entrances,
    files,
    grown,
    moved,
    opened,
    parts,
    paths,
    penalties,
    pipelines,
    plans,
    preparations,
    reaches,
    runs,
    segments,
    settlings,
    skipping,
    surroundings,
    trainings,
    unseen,
)
from conformance.mutants.planted import Planted
from conformance.suite.statuses import Status

NOTICED = Path(__file__).with_name("noticed.toml")
_MODULES = (
    plans,
    segments,
    runs,
    boundaries,
    trainings,
    entrances,
    preparations,
    captures,
    changed,
    containers,
    files,
    grown,
    moved,
    opened,
    parts,
    paths,
    penalties,
    pipelines,
    reaches,
    settlings,
    skipping,
    surroundings,
    unseen,
)


@dataclass(frozen=True)
class Notice:
    """What a case must come to with the bug, and without: a pass, or the refusal that the bug does away with.

    `says` are words of the reason that it must give with the bug.
    """

    status: Status
    without: Status = Status.PASS
    says: str = ""


@dataclass(frozen=True)
class Mutant:
    """A planted bug: what it breaks, in which module of `ariadne` it would be, and what the cases that notice it come to."""

    name: str
    breaks: str
    piece: str
    kind: type[Planted]
    noticed: Mapping[str, Notice]

    @property
    def target(self) -> str:
        """How `--target` names it."""
        return f"{__name__}:{self.name}"


def _notice(given: str | dict[str, str]) -> Notice:
    if isinstance(given, str):
        return Notice(Status(given))
    return Notice(Status(given["with"]), Status(given.get("without", Status.PASS)), given.get("says", ""))


def _found() -> Iterator[Mutant]:
    noticed = tomllib.loads(NOTICED.read_text(encoding="utf-8"))
    for module in _MODULES:
        for name, cls in vars(module).items():
            if isinstance(cls, type) and issubclass(cls, Planted) and cls is not Planted and not name.startswith("_"):
                name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
                cases = {case: _notice(given) for case, given in noticed.pop(name, {}).items()}
                yield Mutant(name, (cls.__doc__ or "").strip(), cls.piece, cls, MappingProxyType(cases))
    if noticed:
        raise ValueError(f"{NOTICED.name}: there is no mutant {', '.join(noticed)}")


MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in _found()})


def __getattr__(name: str) -> Callable[..., Planted]:
    if name == "no_bug":
        return Planted.prepare
    if name in MUTANTS:
        return MUTANTS[name].kind.prepare
    raise AttributeError(f"there is no mutant {name!r}; there are {', '.join(MUTANTS)}")


__all__ = ["MUTANTS", "Mutant", "Notice", "Planted"]
