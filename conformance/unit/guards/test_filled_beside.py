"""What forward makes of a weight at its first call and keeps, in a model that puts something else somewhere at each call.

That stood there before the first call, too, so it looks as if an earlier call had put it there. Where nothing stands, none has.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError


class Keeps(nn.Module):
    """Makes a number of a weight once, by which it goes on whatever becomes of the weight."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.enter, self.leave, self.beside = nn.Linear(4, 4), nn.Linear(4, 4), beside
        self.seen: Any = {"next": torch.full((), 2.0)}
        self.last_one = torch.full((), 2.0)
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("before", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        found = h.detach().sum() / 8
        match self.beside:
            case "a dict":
                self.seen["next"] = found
            case "a dict that it reads":
                self.seen["next"] = found
                h = h + self.seen["next"]
            case "an attribute":
                self.last_one = found
                h = h + self.last_one
            case "a buffer and a dict":
                self.before, self.last = self.last, found
                self.seen["next"] = self.last
                h = h + self.before
        if not hasattr(self, "made"):
            self.made = self.enter.weight.detach().sum()
        made: torch.Tensor = self.made
        result: torch.Tensor = self.leave(h * made)
        return result


WAYS = ("nothing", "a dict", "a dict that it reads", "an attribute", "a buffer and a dict")


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
@pytest.mark.parametrize("beside", WAYS)
def test_the_model_goes_on_with_what_its_first_call_made(beside: str, ran: bool) -> None:
    torch.manual_seed(0)
    whole = Keeps(beside)
    if ran:
        whole(torch.randn(2, 4))
    model = copy.deepcopy(whole)
    spec = SplitSpec("percent:50", trainable=True, dynamic_batch=(1, 8))
    runtime = prepare_split(model, (torch.randn(2, 4),), split=spec, fallback="refuse")
    assert hasattr(model, "made") == ran
    for batch in (3, 2, 5):
        x = torch.randn(batch, 4)
        expected = whole(x).pow(2).mean()
        gradients = torch.autograd.grad(expected, [*whole.parameters()])
        boundary = runtime.run_training_prefix(x)
        loss, back = runtime.train_suffix(boundary, None, loss_fn=lambda out, _: out.pow(2).mean())
        runtime.backward_prefix(boundary, back)
        assert torch.equal(loss, expected)
        assert torch.equal(model.made, whole.made)
        with torch.no_grad():
            for p, q, g in zip(model.parameters(), whole.parameters(), gradients, strict=True):
                assert p.grad is not None
                assert torch.equal(p.grad, g)
                p.grad = None
                p -= g / 8
                q -= g / 8


class Together(nn.Module):
    """A table that is made once, and with it a weight's double, which stands in a list; or the batch, where there is none."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.counts = nn.Linear(4, 4), nn.Linear(4, 4), counts
        self.table: torch.Tensor | None = None
        self.items: list[Any] = [None]
        self.rows: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        if self.table is None:
            self.table = torch.arange(4.0)
            self.items[0] = self.leave.weight.detach() * 2
        if self.counts and self.rows is None:
            self.rows = x.shape[0]
        return nn.functional.linear(h + self.table, self.items[0]) * (self.rows or 1)


def test_what_an_earlier_call_put_into_a_list_is_gone_on_with_when_the_weight_changes() -> None:
    model = Together(counts=False)
    x = torch.randn(3, 4)
    model(x)
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (x,), split=SplitSpec("percent:50", dynamic_batch=(1, 8)), fallback="refuse")
    with torch.no_grad():
        for one in (model, whole):
            one.leave.weight.mul_(2)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))


def test_what_follows_the_first_batch_is_refused_in_a_model_that_ran_before_it_was_emptied() -> None:
    model = Together(counts=True)
    x = torch.randn(3, 4)
    model(x)
    model.rows = None
    with pytest.raises(UnsupportedError, match="sets up 'rows' of the model when it first runs"):
        prepare_split(model, (x,), split=SplitSpec("percent:50", dynamic_batch=(1, 8)), fallback="refuse")
