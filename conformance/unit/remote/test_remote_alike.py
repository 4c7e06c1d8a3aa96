"""What both sides must have alike for a step to be one of the whole model: optimizers and schedulers of tied weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.errors import SpecError, TrainingError
from ariadne.remote import Server
from conformance.unit.remote_kit import beside


class Tied(nn.Module):
    """Its embedding is its head's weight, on both sides of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens)))  # type: ignore[no-any-return]


TOKENS = torch.arange(5)
Make = Callable[[Any], Any]


def halves(model: nn.Module, x: torch.Tensor, cut: str, folder: Path) -> tuple[ariadne.Half, Path]:
    split = ariadne.prepare_split(model, (x,), split=cut)
    for side in ("prefix", "suffix"):
        split.save(folder / side, side=side)
    return ariadne.load(folder / "prefix"), folder / "suffix"


def stepped_twice(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.mark.parametrize(
    ("make", "rate", "there", "why"),
    [
        (lambda ps: torch.optim.Adam(ps, lr=0.1), None, None, "Adam steps it here, SGD there"),
        (lambda ps: torch.optim.SGD(ps, lr=0.2), None, None, "SGD has lr=0.2 here, and lr=0.1 there"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), None, None, "SGD has momentum=0.9 here, and momentum=0"),
        (lambda ps: torch.optim.SGD([*ps][1:], lr=0.1), None, None, "the optimizer here does not have it"),
        (
            lambda ps: torch.optim.SGD(ps, lr=0.1),
            stepped_twice,
            "exponentiallr:gamma=0.5",
            "StepLR moves the rate here",
        ),
        (
            lambda ps: torch.optim.SGD(ps, lr=0.2),
            stepped_twice,
            "steplr:step_size=2",
            "SGD has initial_lr=0.2 here, and initial_lr=0.1 there",
        ),
        (
            lambda ps: torch.optim.SGD(ps, lr=0.1),
            stepped_twice,
            "steplr:step_size=3",
            r"StepLR with step_size=2\.0 moves the rate here, one with step_size=3\.0 there",
        ),
        (
            lambda ps: torch.optim.SGD(ps, lr=0.1),
            lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            "multisteplr:milestones=[2,5]",
            "MultiStepLR with milestones=",
        ),
    ],
)
def test_copies_of_a_tied_weight_that_would_drift_apart_are_refused(
    make: Make, rate: Make | None, there: str | None, why: str, tmp_path: Path
) -> None:
    edge, suffix = halves(Tied(), TOKENS, "after:middle", tmp_path)
    server = Server(
        suffix, listen="127.0.0.1:0", optimizer="sgd:lr=0.1", scheduler=there, loss_fn="cross_entropy", log=None
    )
    before = {name: t.clone() for name, t in edge.state_dict().items()}
    with beside(server), ariadne.connect(server.address, edge, timeout=30) as remote:
        optimizer = make(edge.parameters())
        scheduler = None if rate is None else rate(optimizer)
        with pytest.raises(TrainingError, match=why):
            remote.train_step(TOKENS, targets=TOKENS, optimizer=optimizer, scheduler=scheduler)
        assert all(torch.equal(t, before[name]) for name, t in edge.state_dict().items())
        if there is None:
            remote.train_step(TOKENS, targets=TOKENS, optimizer=torch.optim.SGD(edge.parameters(), lr=0.1))


@pytest.mark.parametrize("how", ["lambda", "by hand", "accumulated"])
def test_a_rate_that_comes_to_differ_is_told_before_the_step_that_it_would_change(how: str, tmp_path: Path) -> None:
    edge, suffix = halves(Tied(), TOKENS, "after:middle", tmp_path)

    def falling(optimizer: Any, at: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < at else 0.5)

    server = Server(
        suffix, listen="127.0.0.1:0", optimizer="sgd:lr=0.1", scheduler=lambda o: falling(o, 9), loss_fn="cross_entropy",
        log=None,
    )  # fmt: skip
    with beside(server), ariadne.connect(server.address, edge, timeout=30) as remote:
        optimizer = torch.optim.SGD(edge.parameters(), lr=0.1)
        scheduler = falling(optimizer, 9 if how == "by hand" else 2)

        def step() -> None:
            if how == "accumulated":
                optimizer.zero_grad()
                boundary = edge.run_training_prefix(TOKENS)
                _, gradients = remote.train_suffix(boundary, TOKENS, accumulate=True)
                remote.backward_prefix(boundary, gradients)
                remote.step(optimizer, scheduler=scheduler)
            else:
                remote.train_step(TOKENS, targets=TOKENS, optimizer=optimizer, scheduler=scheduler)

        step(), step()
        if how == "by hand":
            optimizer.param_groups[0]["lr"] = 0.05
        before = {name: t.clone() for name, t in edge.state_dict().items()}
        with pytest.raises(TrainingError, match=r"SGD has lr=0\.05 here, and lr=0\.1 there"):
            step()
        assert all(torch.equal(t, before[name]) for name, t in edge.state_dict().items())


def test_of_several_groups_that_of_the_tied_weight_counts(tmp_path: Path) -> None:
    edge, suffix = halves(Tied(), TOKENS, "after:embedding", tmp_path)
    half = ariadne.load(suffix)
    tied = [p for p in half.parameters() if p.shape == (9, 6)]
    others = [p for p in half.parameters() if p.shape != (9, 6)]
    groups = torch.optim.SGD([{"params": tied}, {"params": others, "lr": 0.5}], lr=0.1)
    server = Server(half, listen="127.0.0.1:0", optimizer=groups, loss_fn="cross_entropy", log=None)
    with beside(server), ariadne.connect(server.address, edge, timeout=30) as remote:
        with pytest.raises(TrainingError, match=r"SGD has lr=0\.2 here, and lr=0\.1 there"):
            remote.train_step(TOKENS, targets=TOKENS, optimizer=torch.optim.SGD(edge.parameters(), lr=0.2))
        remote.train_step(TOKENS, targets=TOKENS, optimizer=torch.optim.SGD(edge.parameters(), lr=0.1))


def test_an_option_that_is_no_literal_of_pythons_is_named(tmp_path: Path) -> None:
    _, suffix = halves(Tied(), TOKENS, "after:middle", tmp_path)
    with pytest.raises(SpecError, match=r"'true' is no literal of Python's, such as True, 0\.9 or 'text'"):
        Server(suffix, listen="127.0.0.1:0", optimizer="sgd:lr=0.1,nesterov=true", loss_fn="cross_entropy", log=None)
