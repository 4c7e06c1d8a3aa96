"""Functions that draw are there in many a module's globals: that changes nothing. Where a generator stands is not to be asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as draw
from random import randrange
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import nn

from ariadne import prepare_split
from ariadne.errors import UnsupportedError
from conformance.unit.trap_kit import Fn, numbers

X = numbers(2, 4)
Read = Callable[[], Any]


def model(read: Read, always: bool) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x) + read())) if always or self.noisy else self.b(torch.relu(self.a(x)))

    made = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    made.noisy = False
    return made


def bound() -> float:
    return randrange(5) + draw()


def by_module() -> float:
    return random.randrange(5) + random.random()


def numpys() -> float:
    return float(rand() + np.random.rand())


@pytest.mark.parametrize("read", [bound, by_module, numpys])
def test_a_draw_on_a_path_that_is_not_taken_does_not_tie_a_plan_to_where_the_generator_stands(read: Read) -> None:
    net = model(read, always=False)
    runtime = prepare_split(net, (X,), split="50%")
    bound(), numpys()
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), net(X))
    with pytest.raises(UnsupportedError, match=r"draws from (random|numpy\.random)"):
        prepare_split(model(read, always=True), (X,), split="50%")


@pytest.mark.parametrize(
    "read",
    [
        lambda: torch.get_rng_state()[8],
        lambda: torch.initial_seed() % 7,
        lambda: torch.random.initial_seed() % 5,
        lambda: random.getstate()[1][1] % 7,
        lambda: float(np.random.get_state()[1][3] % 7),
    ],
)
def test_where_a_generator_stands_is_not_to_be_asked(read: Read) -> None:
    with pytest.raises(UnsupportedError, match="says where a random generator stands"):
        prepare_split(model(read, always=True), (X,), split="50%")
