"""A suffix asks nothing of the places into which its prefix puts something."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split


class Delay(nn.Module):
    """What passed before is added; and Python asks which of its parameters and buffers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("before", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        different = {id(t) for t in (*self.parameters(), *self.buffers())}
        h = self.a(x) * len(different)
        self.before = self.last
        h = torch.relu(h) + self.before
        self.last = h.detach().sum()
        found: Tensor = self.b(h)
        return found


@pytest.mark.parametrize("batch", [2, 1, 5])
def test_a_cut_between_two_buffers_of_which_one_is_handed_to_the_other(batch: int) -> None:
    torch.manual_seed(0)
    model = Delay().eval()
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("percent:50", dynamic_batch=(1, 8)))
    for cut in runtime.candidates:
        if not cut.safe:
            continue
        split = runtime.resplit(cut)
        for _ in range(2):
            x = torch.randn(batch, 4)
            assert torch.equal(split.run_suffix(split.run_prefix(x)), whole(x))
        assert torch.equal(model.before, whole.before)
        assert torch.equal(model.last, whole.last)
