"""The `id` of a size tells which number it is: small ints are one object each. What follows it is right at every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.capture.disguise import based_on, posing_as

SEEN = [id(n) for n in range(9)]
READS: dict[str, Callable[[Any], bool]] = {
    "compared with that of a number": lambda n: id(n) == id(6),
    "among several": lambda n: id(n) in SEEN[4:],
    "a key": lambda n: {id(7): True}.get(id(n), False),
    "through map": lambda n: next(map(id, [n])) == id(6),
}


class Asked(nn.Module):
    """(B, 4) -> (B, 4), doubled where `reads` says so. `real`: only real runs tell."""

    def __init__(self, reads: Callable[[Any], bool], real: bool) -> None:
        super().__init__()
        self.reads, self.real, self.a, self.b = reads, real, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.real and not bool((y * 0 == 0).all()):  # fake tensors stop here
            y = -y
        found: torch.Tensor = self.b(y) * (2.0 if self.reads(x.shape[0]) else 1.0)
        return found


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("case", READS)
def test_the_id_of_a_size_is_answered_as_by_the_model(case: str, real: bool) -> None:
    model = Asked(READS[case], real)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="percent:50")
    for batch in range(1, 9):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x)), f"batch {batch}"


def test_the_id_of_anything_else_costs_no_range() -> None:
    model = Asked(lambda n: id(model) > 0 and n > 0, False)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="percent:50")
    assert runtime.plan.captured_by == "symbolic"
    assert str(runtime.plan.batches) == "1 to 64"


class Sorted(nn.Module):
    """(B, 4) -> (B, 4); the samples are sorted, and put back by an index that is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        order = torch.argsort(y[:, 0])
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0))
        if not bool((y * 0 == 0).all()):  # fake tensors stop here
            y = -y
        found: torch.Tensor = self.b(y[order])[back]
        return found


def test_that_capture_itself_looks_at_what_is_written_costs_no_range() -> None:
    runtime = prepare_split(Sorted(), (torch.randn(2, 4),), split="percent:50")
    assert runtime.plan.captured_by == "observed"
    assert str(runtime.plan.batches) == "2 to 64"


def test_a_symbol_whose_class_has_no_base_poses_as_a_number_too() -> None:
    class Bare:  # as torch.SymInt up to torch 2.13
        pass

    n = Bare()
    assert not isinstance(n, int)
    with based_on(Bare, posing_as(int, lambda: True)):
        assert isinstance(n, int)
        assert n.numerator is n  # type: ignore[attr-defined]
    assert not isinstance(n, int)
    assert not vars(Bare).keys() & {"__class__", "numerator"}
