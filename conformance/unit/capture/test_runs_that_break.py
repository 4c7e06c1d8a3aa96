"""What forward writes in runs that nobody records, and that may break off, is put back: with a fallback, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.capture.written import Writes
from conformance.unit.trap_kit import Fn, numbers, same

X = numbers(4, 6)
KEPT = torch.zeros(6)
ROWS = torch.zeros(2, 6)


def attribute(s: Any, h: torch.Tensor) -> None:
    s.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)


def in_a_dict(s: Any, h: torch.Tensor) -> None:
    s.stats["mean"].mul_(0.9).add_(h.detach().mean(0) * 0.1)


def by_out(s: Any, h: torch.Tensor) -> None:
    torch.add(s.mean, h.detach()[0], out=s.mean)


def by_index(s: Any, h: torch.Tensor) -> None:
    s.mean[:2] = h.detach()[0, :2]


def a_variable(s: Any, h: torch.Tensor) -> None:
    KEPT.add_(h.detach()[0])


def views_of_a_variable(s: Any, h: torch.Tensor) -> None:
    ROWS[0].add_(1)
    ROWS[:, :3].mul_(2).add_(1)
    ROWS[0] = h.detach()[0]


def momentum(s: Any, h: torch.Tensor) -> None:
    with torch.no_grad():
        s.b.weight.mul_(0.9)


def statistics(s: Any, h: torch.Tensor) -> None:
    torch.nn.functional.batch_norm(h, s.mean, s.variance, training=True)


WRITES = [attribute, in_a_dict, by_out, by_index, a_variable, views_of_a_variable, momentum, statistics]


def same_again(s: Any) -> None:
    n = s.n
    s.n = n


def counted(s: Any) -> None:
    s.n += 1


def model_of(write: Callable[..., None], read: Callable[..., None]) -> Fn:
    KEPT.zero_()
    ROWS.zero_()
    torch.manual_seed(0)

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = s.a(x)
        write(s, h)
        read(s)  # it stands there since `__init__`: where it is taken away to see a first call, forward breaks off here
        return s.c(torch.tanh(s.b(h + s.n + s.mean)))

    model = Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 6))
    model.mean, model.variance, model.n = torch.zeros(6), torch.ones(6), torch.zeros(())
    model.stats = {"mean": torch.zeros(6)}
    return model


def state(model: Any) -> list[torch.Tensor]:
    found = [KEPT, ROWS, model.mean, model.variance, model.n, model.stats["mean"], torch.get_rng_state()]
    return [t.detach().clone() for t in (*found, *model.parameters())]


@pytest.mark.parametrize("fallback", ["refuse", "python"])
@pytest.mark.parametrize("read", [same_again, counted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_a_write_before_the_break_is_put_back_and_calls_are_the_models(write: Any, read: Any, fallback: Any) -> None:
    model = model_of(write, read)
    before, whole = state(model), copy.deepcopy(model)
    spec = SplitSpec("after:b", trainable=False)
    runtime = prepare_split(model, (X,), split=spec, fallback=fallback)
    same(before, state(model), "what preparing left")
    with torch.no_grad():
        mine = [runtime.run_suffix(runtime.run_prefix(X)) for _ in range(2)]
        left, (KEPT[:], ROWS[:]) = state(model), before[:2]
        theirs = [whole(X) for _ in range(2)]
    same(theirs, mine, "the results")
    same(state(whole), left, "what two calls leave")


def test_a_draw_before_the_break_moves_no_generator() -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        if s.table is None:
            s.table = torch.rand(6)
        return s.b(s.a(x) * s.table)

    model = Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    model.table = torch.ones(6)
    before = torch.get_rng_state()
    prepare_split(model, (X,), split="after:a")
    same(before, torch.get_rng_state(), "the generator")


@pytest.mark.planted
def test_without_what_keeps_the_written_preparing_leaves_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writes, "keep", lambda *_: None)
    model = model_of(in_a_dict, same_again)
    prepare_split(model, (X,), split="after:b")
    assert model.stats["mean"].any()
