"""Outside: what steps read beside the network, and a session changes: functions, a variable, a setting of torch, a tensor, a frozen
module, an object, results that a function keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.backends.mha
from torch import Tensor, nn

VARIABLE = "ARIADNE_SESSION_SCALE"
ACTS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.sin, torch.sigmoid)
SCALES = (1.0, 2.0, 0.5)


class Teacher(nn.Module):
    """A weight that no one trains, and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) if self.training else x.sin() * self.weight


class Box:
    """Numbers by names, as attributes and by Python's protocols."""

    def __init__(self, **numbers: float) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[float]:
        return iter(self.numbers.values())

    def __contains__(self, name: object) -> bool:
        return name in self.numbers

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["numbers"][name]
        except KeyError:
            raise AttributeError(name) from None


def doubled(x: Tensor) -> Tensor:
    """What a session puts in the place of `softened`."""
    return x * 2


def softened(x: Tensor) -> Tensor:
    """What a step calls by its name."""
    return x * 0.75


FUNCTIONS = (softened, doubled)
act: Callable[[Tensor], Tensor] = ACTS[0]
scale = SCALES[0]
bent = FUNCTIONS[0]
tau, box, teacher, table = torch.ones(()), Box(a=1.0), Teacher(), {"a": 1.0}
kept = {2: 1.0}  # what `remembered` gives of it, until it has forgotten


def by_default(by: list[float] = [1.0]) -> float:  # noqa: B006 - what is to be seen
    """A number in a default that can be written into."""
    return by[0]


def annealed_by(start: float) -> tuple[Callable[[], float], Callable[[float], None]]:
    """A number that two functions share: one reads it, one sets it."""
    temperature = start

    def read() -> float:
        return temperature

    def put(value: float) -> None:
        nonlocal temperature
        temperature = value

    return read, put


annealed, anneal = annealed_by(1.0)
factors = [1.0, 0.5]


def by_factors() -> float:
    """The sum of a list that it goes through."""
    return sum(factor * 2 for factor in factors)


KEPT: dict[str, Callable[[], float]] = {"default": by_default, "cell": annealed, "iterated": by_factors}


def called(x: Tensor) -> Tensor:
    """By two functions that may be other ones by now, and a number."""
    return softened(act(x)) * scale


def asked(x: Tensor) -> Tensor:
    """By a setting of torch, and a variable of the environment."""
    return x * (2 if torch.backends.mha.get_fastpath_enabled() else 3) * float(os.environ.get(VARIABLE, "1"))


def taught_by(teacher: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that calls a module which only it knows."""

    def taught(x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = teacher(x)
        return found

    return taught


taught = taught_by(teacher)


@lru_cache(maxsize=4)
def remembered(key: int) -> float:
    """A number, kept from its first call on."""
    return kept[key]


def replace_function(number: int) -> None:
    """Let other things stand where the steps find functions and a number."""
    table = globals()
    table["act"], table["softened"] = ACTS[number % 3], FUNCTIONS[number // 3 % 2]
    table["scale"] = SCALES[number // 6 % 3]


def change_value(number: int) -> None:
    """Another number in a default, in a cell of a closure, and in a list that is gone through."""
    value = SCALES[number // 3 % 3]
    if number % 3 == 0:
        by_default.__defaults__[0][0] = value
    elif number % 3 == 1:
        anneal(value)
    else:
        factors[1:] = [value * 0.5] * (1 + number // 9 % 2)


def flip_switch(number: int) -> None:
    """Let torch's fast path of attention be on, or off."""
    torch.backends.mha.set_fastpath_enabled(number % 2 == 0)


def set_variable(number: int) -> None:
    """Set the variable of the environment, or take it away."""
    os.environ[VARIABLE] = str(number % 3)
    if number % 3 == 0:
        del os.environ[VARIABLE]


def replace_held_function(number: int) -> None:
    """Let another function stand in this module, in the object, and on a function."""
    globals()["bent"] = FUNCTIONS[number % 2]
    box.__dict__["bent"] = called.__dict__["bent"] = FUNCTIONS[number // 2 % 2]


def change_tensor(number: int) -> None:
    """Write another number into the tensor, or put another tensor in its place."""
    value = SCALES[number // 2 % 3]
    if number % 2:
        globals()["tau"] = torch.tensor(value)
    else:
        tau.fill_(value)


def change_teacher(number: int) -> None:
    """Another mode, another number in its weight, or another weight."""
    teacher.train(number % 2 == 0)
    if number // 2 % 3 == 1:
        teacher.weight.fill_(SCALES[number // 6 % 3])
    elif number // 2 % 3 == 2:
        teacher.weight = nn.Parameter(torch.tensor(SCALES[number // 6 % 3]), requires_grad=False)


def change_object(number: int) -> None:
    """Other numbers in the object and in the dict, or other names for them."""
    for numbers in (box.numbers, table):
        numbers["a"] = SCALES[number % 3]
        numbers.pop("b", None)
        if number // 3 % 2:
            numbers["b"] = 0.5


def change_kept(number: int) -> None:
    """Another number for the function that keeps results; every second time it has forgotten, too."""
    kept[2] = SCALES[number // 2 % 3]
    if number % 2:
        remembered.cache_clear()


def put_back() -> None:
    """All of it stands as at first."""
    for put in (replace_held_function, change_tensor, change_object):
        put(0)
    change_teacher(2)
    change_kept(1)
    replace_function(0)
    for number in range(3):
        change_value(number)
    flip_switch(0)
    set_variable(0)


replace_held_function(0)
