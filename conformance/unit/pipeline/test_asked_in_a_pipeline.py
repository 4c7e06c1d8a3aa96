"""Gradients that the loss of a pipeline asks for by itself: of what earlier parts made, the last part has a share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ariadne.compare import difference
from ariadne.errors import AriadneError
from ariadne.pipeline import prepare_pipeline
from conformance.unit.pipeline.ranks import run


class Featured(nn.Module):
    """Features that are given out beside what is computed from them; and, beside both, a row that only the last part computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = torch.tanh(self.a(x))
        middle = torch.tanh(self.b(features))
        last = self.c(middle)
        return last.tanh(), features, last


def plain(out: Any, target: Any) -> torch.Tensor:
    return (out[0] - target).pow(2).mean() + out[1].pow(2).mean()


def hooked(which: int) -> Callable[..., torch.Tensor]:
    def loss(out: Any, target: Any) -> torch.Tensor:
        out[which].register_hook(lambda g: g * 2)
        return plain(out, target)

    return loss


def retained(out: Any, target: Any) -> torch.Tensor:
    out[1].retain_grad()
    return plain(out, target)


def penalised(which: int) -> Callable[..., torch.Tensor]:
    def loss(out: Any, target: Any) -> torch.Tensor:
        (g,) = torch.autograd.grad(out[0].sum(), out[which], create_graph=True, allow_unused=True)
        return plain(out, target) + (0.0 if g is None else g.pow(2).sum())

    return loss


def on_its_node(out: Any, target: Any) -> torch.Tensor:
    out[1].grad_fn.register_prehook(lambda gs: tuple(g * 2 for g in gs))
    return plain(out, target)


LOSSES = {
    "plain": plain,
    "hook": hooked(1),
    "retain_grad": retained,
    "grad": penalised(1),
    "hook on a node": on_its_node,
    "hook on the last part's own": hooked(2),
    "grad of the last part's own": penalised(2),
}


def asking(rank: int, world: int) -> dict[str, str]:
    told = {}
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        whole = Featured()
        model, x, y = copy.deepcopy(whole), torch.randn(4, 4), torch.randn(4, 4)
        pipeline = prepare_pipeline(model, (x,), boundaries=["after:a", "after:b"])
        schedule = pipeline.schedule("Interleaved1F1B", microbatches=1, loss_fn=loss)
        loss(whole(x), y).backward()
        try:
            schedule.step(x, target=y)
        except AriadneError as error:
            told[name] = f"{type(error).__name__}: {error}"
            continue
        grads: Any = [{n: p.grad for n, p in m.named_parameters()} for m in (whole, model)]
        told[name] = difference(*grads) or "equal"
    return told


def test_a_loss_that_asks_for_what_an_earlier_part_made_is_refused() -> None:
    ((error, told),) = run(asking, 1)
    assert error is None, told
    equal = {name for name, words in told.items() if words == "equal"}
    assert equal == {"plain", "hook on the last part's own", "grad of the last part's own"}, told
    for name in LOSSES.keys() - equal:
        assert told[name].startswith("TrainingError: loss_fn "), told[name]
