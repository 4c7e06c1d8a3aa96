"""Training flags that forward itself sets, as to freeze a BatchNorm: they are set in each call, and none is asked for before it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ariadne
from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError


class Freezing(nn.Module):
    def __init__(self, forward: Callable[[Freezing, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.enc, self.mid, self.head, self.rule = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2), forward
        self.backbone = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(self, x)

    def ends(self, h: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(h).relu())


def freezes(m: Freezing, x: torch.Tensor) -> torch.Tensor:
    m.backbone.eval()
    return m.ends(m.backbone(m.enc(x)))


def freezes_and_puts_back(m: Freezing, x: torch.Tensor) -> torch.Tensor:
    m.backbone.eval()
    h = m.backbone(m.enc(x))
    m.backbone.train()
    return m.ends(h)


def freezes_all_and_fills_a_table(m: Freezing, x: torch.Tensor) -> torch.Tensor:
    m.eval()
    if not hasattr(m, "table"):
        m.table = {"ones": torch.ones(6)}
    return m.ends(m.backbone(m.enc(x)) + m.table["ones"])


def freezes_late(m: Freezing, x: torch.Tensor) -> torch.Tensor:
    h = m.backbone(m.enc(x))
    m.backbone.eval()
    return m.ends(h)


def flags(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rule", [freezes, freezes_and_puts_back, freezes_all_and_fills_a_table])
def test_it_leaves_the_flags_that_the_model_leaves_and_serves_whatever_they_were(
    rule: Callable[[Freezing, torch.Tensor], torch.Tensor], frozen: bool, train: bool
) -> None:
    model = Freezing(rule)
    model.backbone.train(not frozen)
    runtime = prepare_split(model, (torch.randn(4, 4),), split=SplitSpec("percent:50", trainable=train))
    assert flags(model) == {p: not (frozen and p.startswith("backbone")) for p in flags(model)}
    whole = copy.deepcopy(model)
    for before in (None, None, True, False, True):
        for one in (model, whole):
            if before is not None:
                one.train(before or rule is not freezes_all_and_fills_a_table)
                one.backbone.train(before)
        x = torch.randn(3, 4)
        if train:
            loss = whole(x).sum()
            loss.backward()
            boundary = runtime.run_training_prefix(x)
            mine, gradients = runtime.train_suffix(boundary, loss_fn=lambda y, _: y.sum())
            runtime.backward_prefix(boundary, gradients)
            assert torch.equal(mine, loss)
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            assert all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)
        else:
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
        assert flags(model) == flags(whole)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), whole.buffers(), strict=True))


def test_a_flag_that_is_read_first_and_then_set_is_refused_as_it_is_prepared() -> None:
    with pytest.raises(UnsupportedError, match="gives another result when it runs again"):
        prepare_split(Freezing(freezes_late), (torch.randn(4, 4),), split="percent:50")


def test_halves_in_files_set_it_too() -> None:
    model, x = Freezing(freezes), torch.randn(4, 4)
    runtime = prepare_split(model, (x,), split="percent:50")
    with tempfile.TemporaryDirectory() as directory:
        halves = []
        for side in ("prefix", "suffix"):
            runtime.save(Path(directory) / side, side=side)
            halves.append(ariadne.load(Path(directory) / side))
        found = halves[1].run_suffix(halves[0].run_prefix(x))
    assert torch.equal(found, model(x))
