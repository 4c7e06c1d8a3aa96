"""What forward asks of each tensor that its ops make: asked of every one, that takes no look through all ops that ran before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.capture import recorded

OPS = 60


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(OPS):
            x = torch.sin(x)
            if hasattr(x, "mark"):
                x = x + 1
        return x


def test_whether_a_tensor_was_made_here_is_not_looked_up_in_all_ops_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = [0]
    plain = recorded.tensors_in

    def counted(value: object) -> object:
        looked[0] += 1
        return plain(value)

    monkeypatch.setattr(recorded, "tensors_in", counted)
    prepare_split(Asking(), (torch.ones(2, 4),), split="50%")
    runs = 4  # with gradients, at batch 1, without, and on tensors without data
    assert looked[0] <= runs * 2 * OPS
