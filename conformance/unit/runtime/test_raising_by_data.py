"""A forward that raises on bad data leaves behind what it had done until then, as the model's own call does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split


class Careful(nn.Module):
    """Moves statistics and draws before it finds bad data, and after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.drop(self.norm(x)))
        self.calls.add_(1)
        if bool((x > 100).any()):
            raise FloatingPointError("bad data")
        return self.last(self.drop(h))


def told(call: Any, x: Tensor, model: Careful) -> list[Any]:
    try:
        out = call(x).detach().clone()
    except FloatingPointError as error:
        out = str(error)
    return [out, copy.deepcopy(model.state_dict()), torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(torch.equal(t, b[k]) for k, t in a.items())
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


CUTS = ["cut:1", "cut:4", "100%"]


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("cut", CUTS)
def test_what_was_done_before_bad_data_were_found_stands(cut: str, trains: bool) -> None:
    torch.manual_seed(0)
    whole = Careful().train()
    good, bad = torch.randn(4, 4), torch.full((4, 4), 200.0)
    model = copy.deepcopy(whole)
    probe = prepare_split(model, (good,), split="50%")
    cut = probe.candidates[-1].split_id if cut == "100%" else cut
    runtime = probe.resplit(cut)

    def split(x: Tensor) -> Tensor:
        if not trains:
            return runtime.run_suffix(runtime.run_prefix(x))
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, targets=None: out.sum())
        runtime.backward_prefix(boundary, gradients)
        return loss

    def all_of_it(x: Tensor) -> Tensor:
        out = whole(x)
        return out.sum() if trains else out

    torch.manual_seed(1)
    expected = [told(all_of_it, x, whole) for x in (good, bad, good, bad, good)]
    torch.manual_seed(1)
    found = [told(split, x, model) for x in (good, bad, good, bad, good)]
    for a, b in zip(expected, found, strict=True):
        assert all(map(same, a, b))
