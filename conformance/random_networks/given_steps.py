"""Steps with what a call is given beside tensors: containers that forward fills or empties, an array and objects that it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

NUMBERS = (2.0, 0.5, 3.0)  # what stands in an array or an object at first, and later


def hand_on(frame: Any, x: Tensor, how: str) -> Tensor:
    """Into the list or the dict that holds the inputs, or out of it; there is neither where they come one by one."""
    given = frame.given
    if isinstance(given, list):
        given.append(x) if how == "put" else given.extend([x, x])
    elif isinstance(given, dict) and how == "out":
        given.pop(next(reversed(given)))
    elif isinstance(given, dict):
        given.update({"x": x}) if how == "put" else given.setdefault("found", []).append(x)
    return x * 1


def beside() -> SimpleNamespace:
    """What is handed in beside tensors."""
    return SimpleNamespace(array=np.array([NUMBERS[0]]), scale=NUMBERS[0], inner=SimpleNamespace(scale=NUMBERS[0]))


def by_beside(frame: Any, x: Tensor, asked: str) -> Tensor:
    """By a number in the array, of the object, or of the one that it holds."""
    held = frame.beside
    if held is None:  # as on meta tensors
        return x * NUMBERS[0]
    return x * (float(held.array[0]) if asked == "array" else held.scale if asked == "object" else held.inner.scale)


def change_beside(held: SimpleNamespace, number: int) -> None:
    """Another number at one of these places, in place."""
    which, now = number % 3, NUMBERS[1 + number // 3 % 2]
    if which == 0:
        held.array[0] = now
    else:
        (held, held.inner)[which - 1].scale = now
