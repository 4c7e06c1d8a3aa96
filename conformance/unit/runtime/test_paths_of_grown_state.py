"""Over a wire a call goes on in no suffix that was captured of state of another size, whatever its own prefix has made of that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import BoundaryPayload, SplitRuntime, SplitSpec
from ariadne.errors import HalfError, WitnessError
from conformance.unit.refusing import prepare_split


class Grows(nn.Module):
    """(B, 2) to (B, 2): by how many rows a buffer has, which each call gives one more; then by the sign of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.register_buffer("rows", torch.ones(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        count = len(self.rows)
        self.rows = torch.cat([self.rows, self.rows.new_ones(1, 2)])[-4:]
        h = self.enter(x).tanh()
        found: Tensor = self.leave(h * count if h.sum() > 0 else h - count)
        return found


def grown(rows: int, model: Grows) -> None:
    model.rows = torch.ones(rows, 2)


@pytest.mark.parametrize("saved", [False, True], ids=["bytes", "files"])
def test_a_suffix_that_found_state_of_another_size_does_not_serve(saved: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Grows().eval()
    up = torch.ones(2, 2) * model.enter(torch.ones(2, 2)).tanh().sum().sign()
    down = -up
    with torch.no_grad():
        runtime = prepare_split(model, (up,), split=SplitSpec("after:enter"))
        assert isinstance(runtime, SplitRuntime)
        runtime.run_suffix(runtime.run_prefix(down))  # a plan for 1 row
        grown(3, model)
        runtime.run_suffix(runtime.run_prefix(up))  # and one for 3, of the other path
        grown(3, model)
        sides = (runtime, runtime)
        if saved:
            for side in ("prefix", "suffix"):
                runtime.save(tmp_path / side, side=side)
            sides = tuple(ariadne.load(tmp_path / side) for side in ("prefix", "suffix"))
        boundary = BoundaryPayload.from_bytes(sides[0].run_prefix(down).to_bytes())
        with pytest.raises(WitnessError, match="The suffix asks"):
            sides[1].run_suffix(boundary)


class Counts(Grows):
    """By how many numbers the buffer holds, which no op reads."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.enter(x).tanh() * self.rows.numel())
        return found


def test_a_file_has_no_plan_that_found_another_size_of_what_no_op_reads(tmp_path: Path) -> None:
    model, x = Counts().eval(), torch.ones(2, 2)
    with torch.no_grad():
        runtime = ariadne.prepare_split(model, (x,), split=SplitSpec("after:enter"))
        grown(3, model)
        runtime.run_suffix(runtime.run_prefix(x))
        for rows in (3, 1):
            grown(rows, model)
            halves = []
            for side in ("prefix", "suffix"):
                runtime.save(tmp_path / f"{side}{rows}", side=side)
                halves.append(ariadne.load(tmp_path / f"{side}{rows}"))
            assert torch.equal(halves[1].run_suffix(halves[0].run_prefix(x)), model(x))
        grown(5, model)
        with pytest.raises(HalfError, match="a tensor that no op reads"):
            runtime.save(tmp_path / "none", side="prefix")
