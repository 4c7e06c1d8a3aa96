"""What forward puts into containers outside of the model, by functions that decorators, objects or modules of others lead to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split

CALLS: list[int] = [0]


class Counter:
    def note(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return x


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.counter: Any = Counter()
        self.counters: list[Any] = [Counter()]


class Decorated(_Counts):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return self.last(self.first(x))  # type: ignore[no-any-return]


class OfAnObject(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.counter.note(self.first(x)))  # type: ignore[no-any-return]


class OfAnObjectInAList(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.counters[0].note(self.first(x)))  # type: ignore[no-any-return]


class OfAnObjectThatIsMade(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Counter().note(self.first(x)))  # type: ignore[no-any-return]


class _Counted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return super().forward(x)


TEACHER = _Counted(4, 4)


class OfAModuleInAList(_Counts):
    def __init__(self) -> None:
        super().__init__()
        self.counters = [_Counted(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.counters[0](self.first(x)))  # type: ignore[no-any-return]


class OfAModuleOutside(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(TEACHER(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind",
    [Decorated, OfAnObject, OfAnObjectInAList, OfAnObjectThatIsMade, OfAModuleInAList, OfAModuleOutside],
)
def test_what_a_helper_appends_is_left_as_found_and_appended_at_each_call(kind: type[_Counts]) -> None:
    x = torch.randn(2, 4)
    CALLS[:] = [0]
    split = prepare_split(kind().eval(), (x,), split="after:first")
    assert CALLS == [0]
    for i in range(1, 4):
        split.run_suffix(split.run_prefix(x))
        assert sum(CALLS) == len(CALLS) - 1 == i
