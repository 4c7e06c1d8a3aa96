"""A dict or a set that calls fill by number: a cache, unless a result follows what else is in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitRuntime, prepare_split
from ariadne.errors import ModuleError


def in_its_place(kept: dict[Any, Any], n: int) -> Any:
    if n not in kept:
        kept[n] = torch.arange(4.0) * n
    return kept[n]


def the_first_alone(kept: dict[Any, Any], n: int) -> Any:
    if not kept:
        kept[n] = torch.ones(4)
    return kept.get(n, torch.zeros(4))


def numbered(kept: dict[Any, Any], n: int) -> Any:
    return torch.ones(4) * kept.setdefault((n, 0.5), len(kept))


def the_last_alone(kept: dict[Any, Any], n: int) -> Any:
    if n not in kept:
        kept.clear()
        kept[n] = torch.ones(4) * n
    return kept[n]


class Kept(nn.Module):
    """(B, 4) to (B, 4), by what it keeps for a number that the user sets."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.enter, self.leave, self.kept, self.level, self.how = nn.Linear(4, 4), nn.Linear(4, 4), {}, 1, how

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.enter(x).relu() + self.how(self.kept, self.level))
        return found


class Seen(Kept):
    """The same with a set: only the first number counts."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.kept: Any = set()

    def forward(self, x: Tensor) -> Tensor:
        if (self.how == "first" and not self.kept) or self.how == "each":
            self.kept.add(self.level)
        found: Tensor = self.leave(self.enter(x).relu() * (2 if self.level in self.kept else 1))
        return found


def held(model: Kept, counts: bool) -> None:
    whole, x = copy.deepcopy(model.eval()), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split="after:enter")
    assert isinstance(runtime, SplitRuntime)
    for level in (1, 2, 1, 3):
        model.level = whole.level = level
        with torch.no_grad():
            expected = whole(x)
        if counts and level > 1:
            with pytest.raises(ModuleError, match="at its first call"):
                runtime.run_prefix(x)
        else:
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), expected)


@pytest.mark.parametrize("how", [in_its_place, the_first_alone, numbered, the_last_alone])
def test_a_dict_is_a_cache_where_no_result_follows_what_else_is_in_it(how: Any) -> None:
    torch.manual_seed(0)
    held(Kept(how), how in (the_first_alone, numbered))


@pytest.mark.parametrize("how", ["each", "first"])
def test_a_set_too(how: str) -> None:
    torch.manual_seed(0)
    held(Seen(how), how == "first")
