"""Numbers that Python reads out of tensors are compared by their bits: -0.0 is not 0.0, and NaN is what it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne import load, prepare_split
from ariadne.compare import same_bits
from ariadne.errors import WitnessError

SIGNS: dict[str, Callable[[Tensor], float]] = {
    "tolist": lambda t: math.copysign(2.0, t.tolist()[0][1]),
    "numpy": lambda t: float(np.copysign(2.0, t.numpy()[0, 1])),
    "text": lambda t: 2.0 if "-" in f"{t[0, 1]}" else 3.0,
    "half": lambda t: math.copysign(2.0, t.bfloat16().tolist()[0][1]),
    "imaginary": lambda t: math.copysign(2.0, torch.complex(t[0, 0], t[0, 1]).item().imag),
}
PLUS, MINUS = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, -0.0]])


class Signed(nn.Module):
    """(B, 2) to (B, 2), times a number that follows the sign of the first input's second number."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(2, 4), nn.Linear(4, 2), read

    def forward(self, x: Tensor) -> Tensor:
        by = self.read(x)
        found: Tensor = self.b(self.a(x).relu() * by)
        return found


@pytest.mark.parametrize("way", SIGNS)
def test_a_zero_of_the_other_sign_is_another_number(way: str) -> None:
    """It takes the other path, and a call with the example's sign goes on by the first."""
    model = Signed(SIGNS[way]).eval()
    runtime = prepare_split(model, (PLUS,), split="after:a")
    for x in (MINUS, PLUS, MINUS):
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


@pytest.mark.parametrize("way", ["tolist", "imaginary"])
def test_a_half_from_its_file_tells_the_signs_apart(way: str, tmp_path: Path) -> None:
    runtime = prepare_split(Signed(SIGNS[way]).eval(), (PLUS,), split="after:a")
    runtime.save(tmp_path / "prefix", side="prefix")
    half = load(tmp_path / "prefix")
    half.run_prefix(PLUS)
    with pytest.raises(WitnessError):
        half.run_prefix(MINUS)


def test_the_same_nan_is_no_other_number() -> None:
    runtime = prepare_split(Signed(SIGNS["tolist"]).eval(), (MINUS,), split="after:a")
    odd = torch.tensor([[math.nan, -0.0]])
    runtime.run_prefix(odd)
    plans = len(runtime.plans)
    runtime.run_prefix(odd.clone())
    assert len(runtime.plans) == plans


def test_bits_of_one_type_and_shape() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0, 0], dtype=torch.int32), torch.tensor([0.0, 0.0]))
    assert not same_bits(torch.zeros(2, 1), torch.zeros(2))
    assert same_bits(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())


def test_nested_tensors_hold_the_same_where_their_parts_do() -> None:
    def nested(*numbers: float, layout: torch.layout = torch.strided) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor([n] * k) for k, n in enumerate(numbers, 1)], layout=layout)

    assert same_bits(nested(1.0, 2.0), nested(1.0, 2.0))
    assert not same_bits(nested(0.0, 2.0), nested(-0.0, 2.0))
    assert not same_bits(nested(1.0, 2.0), nested(1.0))
    assert not same_bits(nested(1.0, 2.0), torch.ones(2))
    assert not same_bits(nested(1.0, 2.0), nested(1.0, 2.0, layout=torch.jagged))
