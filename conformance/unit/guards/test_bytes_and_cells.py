"""What lies in memory as bytes, in a cell or in a function's defaults, and what was set on a logger, must not change unseen."""

from __future__ import annotations

import ctypes
import inspect
import logging
import mmap
from collections.abc import Callable
from types import CellType, SimpleNamespace
from typing import Any

import pytest
import torch

from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.held_kit import Net
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

X = numbers(2, 4)


class Settings(ctypes.Structure):
    _fields_ = [("gain", ctypes.c_double)]


def a_function() -> Any:
    def made(gain: float = 1.0, *, other: float = 1.0) -> float:
        return gain

    return made


def a_logger() -> Any:
    found = logging.Logger("of a test")
    found.gain = 1.0  # type: ignore[attr-defined]
    return found


def default_of(f: Any) -> Any:
    return inspect.signature(f).parameters["gain"].default


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an array of ctypes": (lambda: (ctypes.c_double * 2)(1, 2), lambda t: t[0], lambda t: t.__setitem__(0, 5)),
    "a structure": (lambda: Settings(1), lambda t: t.gain, lambda t: setattr(t, "gain", 5)),
    "a map of memory": (lambda: mmap.mmap(-1, 8), lambda t: float(t[0]), lambda t: t.__setitem__(0, 5)),
    "a cell": (lambda: CellType(1.0), lambda t: t.cell_contents, lambda t: setattr(t, "cell_contents", 5.0)),
    "a signature": (a_function, default_of, lambda t: setattr(t, "__defaults__", (5.0,))),
    "defaults": (a_function, lambda t: t.__defaults__[0], lambda t: setattr(t, "__defaults__", (5.0,))),
    "keyword defaults": (
        a_function, lambda t: t.__kwdefaults__["other"], lambda t: t.__kwdefaults__.update(other=5.0)
    ),
    "a logger": (a_logger, lambda t: t.gain, lambda t: setattr(t, "gain", 5.0)),
}  # fmt: skip


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_change_is_seen(case: str, deep: bool) -> None:
    make, read, change = CASES[case]
    thing = make()
    held = SimpleNamespace(things=[thing]) if deep else thing
    net = Net(lambda self, x: x * read(self.held.things[0] if deep else self.held), held=held)
    runtime = prepare_split(net, (X,), split="after:a")
    same(net(X), runtime.run_suffix(runtime.run_prefix(X)))
    change(thing)
    with pytest.raises(ModuleError):
        runtime.run_suffix(runtime.run_prefix(X))


def counts_in_a_cell(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.cell.cell_contents += 1
    return x


def counts_on_a_logger(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.logger.gain += 1
    return x


@pytest.mark.parametrize("way", [counts_in_a_cell, counts_on_a_logger], ids=lambda way: way.__name__)
def test_a_count_there_is_refused(way: Any) -> None:
    with pytest.raises(UnsupportedError, match="forward changes what is in"):
        prepare_split(Net(way, cell=CellType(0), logger=a_logger()), (X,), split="after:a")
