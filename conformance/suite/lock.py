"""`cases.lock`: every case of the suite by name, so that one that vanishes is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from conformance.suite.cases import Case
from conformance.suite.queries import compact, expand, in_order

LOCK = Path(__file__).parents[1].joinpath("cases.lock")
HEADER = "# Every case of the suite, made by `python -m conformance --update-lock`; {a,b} stands for each of a and b.\n"


def read(path: Path = LOCK) -> list[Case]:
    """The cases of a lock file, by model; ValueError names a line that can't be read or that repeats a case."""
    found: dict[Case, int] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text or text.startswith("#"):
            continue
        try:
            named = [Case.parse(name) for name in expand(text)]
        except ValueError as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error
        for case in named:
            if case in found:
                raise ValueError(f"{path.name}:{number}: {case} stands in line {found[case]} already")
            found[case] = number
    return in_order(found)


def text(cases: Iterable[Case]) -> str:
    """The text of a lock file that holds these cases."""
    return HEADER + "".join(f"{entry}\n" for entry in compact(cases))


def sharded(cases: Iterable[Case], shard: tuple[int, int]) -> list[Case]:
    """The cases of shard i of n, counted from 1. Whole models, by a digest of their names, so that a new one moves no other."""
    index, count = shard
    return [case for case in cases if int(hashlib.sha256(case.model.encode()).hexdigest(), 16) % count == index - 1]
