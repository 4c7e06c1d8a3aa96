"""Outside: what steps read beside the network, and a session changes: a function, a variable, a setting of torch."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.backends.mha
from torch import Tensor

VARIABLE = "ARIADNE_SESSION_SCALE"
ACTS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.sin, torch.sigmoid)
SCALES = (1.0, 2.0, 0.5)


def doubled(x: Tensor) -> Tensor:
    """What a session puts in the place of `softened`."""
    return x * 2


def softened(x: Tensor) -> Tensor:
    """What a step calls by its name."""
    return x * 0.75


FUNCTIONS = (softened, doubled)
act: Callable[[Tensor], Tensor] = ACTS[0]
scale = SCALES[0]


def called(x: Tensor) -> Tensor:
    """By two functions that may be other ones by now, and a number."""
    return softened(act(x)) * scale


def asked(x: Tensor) -> Tensor:
    """By a setting of torch, and a variable of the environment."""
    return x * (2 if torch.backends.mha.get_fastpath_enabled() else 3) * float(os.environ.get(VARIABLE, "1"))


def replace_function(number: int) -> None:
    """Let other things stand where the steps find functions and a number."""
    table = globals()
    table["act"], table["softened"] = ACTS[number % 3], FUNCTIONS[number // 3 % 2]
    table["scale"] = SCALES[number // 6 % 3]


def flip_switch(number: int) -> None:
    """Let torch's fast path of attention be on, or off."""
    torch.backends.mha.set_fastpath_enabled(number % 2 == 0)


def set_variable(number: int) -> None:
    """Set the variable of the environment, or take it away."""
    os.environ[VARIABLE] = str(number % 3)
    if number % 3 == 0:
        del os.environ[VARIABLE]


def put_back() -> None:
    """All of it stands as at first."""
    replace_function(0)
    flip_switch(0)
    set_variable(0)
