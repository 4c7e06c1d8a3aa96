"""Where the process's random generators stand: torch's on each device, Python's own, and numpy's where it is there."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

TORCH = "torch"  # with those of its devices
PYTHON, NUMPY = OF_PYTHON = ("random", "numpy.random")
ALL = frozenset({TORCH, *OF_PYTHON})
Names = Collection[str]  # of `ALL`


def states() -> dict[str, Any]:
    """How they stand now."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    return found


def moved_of_python(then: Mapping[str, Any]) -> list[str]:
    """Which of `random` and `numpy.random` moved since."""
    return _of_python_differing(then, states())


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Which generators stand elsewhere, by their names in `ALL`, of two states of the process's."""
    devices = "cuda" in one and "cuda" in other
    same = torch.equal(one["torch"], other["torch"])
    if devices:
        same = same and all(map(torch.equal, one["cuda"], other["cuda"]))
    return [*([] if same else [TORCH]), *_of_python_differing(one, other)]


def _of_python_differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Without an op of torch's: a mode that counts these may be on."""
    names = [PYTHON] if one["python"] != other["python"] else []
    arrays = zip(one["numpy"], other["numpy"], strict=True) if "numpy" in one and "numpy" in other else ()
    if any((a != b).any() if hasattr(a, "any") else a != b for a, b in arrays):
        names.append(NUMPY)
    return names


def put_back(then: Mapping[str, Any], names: Names = ALL) -> None:
    """Put back those that are named: to rewind one that another thread draws from would give that its numbers twice."""
    if TORCH in names:
        torch.set_rng_state(then["torch"])
        if "cuda" in then:
            torch.cuda.set_rng_state_all(then["cuda"])
    if PYTHON in names:
        random.setstate(then["python"])
    if NUMPY in names and "numpy" in then:
        sys.modules["numpy"].random.set_state(then["numpy"])


def of_python(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any], Any] | None:
    """How to read and to put where a generator of Python's or numpy's stands, and where it stands now; None for what is none."""
    kind = type(value)
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):  # which stands nowhere
        return value.getstate, value.setstate, value.getstate()
    if hasattr(kind, "bit_generator") and hasattr(value.bit_generator, "state"):  # numpy.random.Generator
        bits = value.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state"), bits.state
    if kind.__name__ == "RandomState" and hasattr(value, "set_state"):
        return value.get_state, value.set_state, value.get_state()
    return None
