"""Paths: Python reads numbers out of tensors and branches on them; each path has a plan, and a call is answered on its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import SpecError, WitnessError
from conformance.suite.state import seed_torch
from conformance.unit.trap_twins import Twins, same, seeded, square_loss, state


class Net(nn.Module):
    """(B, 6) -> (B, 4): enter, what `middle` makes of it, leave."""

    def __init__(self, middle: Callable[..., Tensor]) -> None:
        super().__init__()
        self.enter, self.left, self.right, self.leave = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.middle = middle
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.middle(self, torch.tanh(self.enter(x))))
        return found


def one_question(m: Net, h: Tensor) -> Tensor:
    return m.left(h).relu() if h.sum() > 0 else m.right(h).sigmoid() * 2


def two_in_a_row(m: Net, h: Tensor) -> Tensor:
    h = m.left(h) if h[0].sum() > 0 else torch.tanh(m.right(h))
    return m.norm(h) if h[0, 0] > 0 else h * 2


def loop_by_data(m: Net, h: Tensor) -> Tensor:
    for _ in range(int(h[0].abs().sum() * 2) % 4):
        h = m.left(h).relu() + h
    return h


def early_exit(m: Net, h: Tensor) -> Tensor:
    h = m.norm(m.left(h))
    if h[0].max() > 1:
        return h
    return m.right(h.relu())


def after_a_write(m: Net, h: Tensor) -> Tensor:
    m.calls += 1
    h = m.norm(h)
    h = m.left(h) if h[0].sum() > 0 else m.right(h)
    m.calls += 2
    return h * (m.calls % 5)


def reads_what_it_wrote(m: Net, h: Tensor) -> Tensor:
    m.calls += 1
    return m.left(h) if m.calls % 2 == 0 else m.right(h)


def layer_drop(m: Net, h: Tensor) -> Tensor:
    for layer in (m.left, m.right):
        if torch.rand(()) < 0.5:
            h = h + layer(torch.dropout(h, 0.3, m.training))
    return h


def under_no_grad(m: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        high = bool(h[0].mean() > 0)
        scale = h.abs().amax() + 1
    return (m.left(h) if high else m.right(h)) / scale


def under_autocast(m: Net, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        low = m.left(h)
        low = low * 2 if low[0].sum() > 0 else m.right(low)
    return low.float()


def called_twice(m: Net, h: Tensor) -> Tensor:
    return m.gate(m.gate(h))  # type: ignore[operator,no-any-return]


def stored_on_one_path(m: Net, h: Tensor) -> Tensor:
    if h[0].sum() > 0:
        m.kept = h.detach() * 2
        return m.left(h)
    return m.right(h)


def used_on_one_path(m: Net, h: Tensor) -> Tensor:
    """What one path alone uses is made before the question."""
    extra, total = m.left(h).sigmoid(), h[0].sum()
    return h * extra if total > 0 else m.right(h)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        return self.way(h) if h[0].sum() > 0 else h - 0.1


MIDDLES = (
    one_question, two_in_a_row, loop_by_data, early_exit, after_a_write, reads_what_it_wrote, layer_drop, under_no_grad,
    under_autocast, called_twice, stored_on_one_path, used_on_one_path,
)  # fmt: skip


def build(middle: Callable[..., Tensor]) -> Net:
    net = Net(middle)
    if middle is called_twice:
        net.gate = Gate()
    return net


def named(middles: Any) -> dict[str, Any]:
    return {"argvalues": middles, "ids": [m.__name__ for m in middles]}


def shown(middle: Callable[..., Tensor], train: bool) -> tuple[Twins, list[Any]]:
    """Twins, of which the split one was shown some inputs beforehand, at every cut."""
    examples = [(seeded((3, 6), seed),) for seed in range(6)]
    twins = Twins(lambda: build(middle), seeded((3, 6), 3), train=train, prepare=partial(prepare_split, more_examples=examples))
    return twins, twins.cuts()


@pytest.mark.parametrize("middle", **named(MIDDLES))
def test_calls_that_change_path_equal_the_model_at_every_cut(middle: Callable[..., Tensor]) -> None:
    twins, cuts = shown(middle, True)
    for runtime in cuts[::2]:
        for seed in range(7):
            seed_torch(seed)
            with torch.no_grad():
                want = twins.whole(seeded((3, 6), seed))
            after = state(twins.whole), twins.whole.kept
            seed_torch(seed)
            boundary = runtime.run_prefix(seeded((3, 6), seed))
            same(want, runtime.run_suffix(boundary))
            same(after, (state(twins.split), twins.split.kept))


@pytest.mark.parametrize("middle", **named(MIDDLES))
def test_training_steps_that_change_path_equal_the_model_at_every_cut(middle: Callable[..., Tensor]) -> None:
    twins, cuts = shown(middle, True)
    for runtime in cuts[1::3]:
        for seed in range(5 if not runtime.candidate.inexact else 0):
            twins.train(seeded((3, 6), seed), steps=1, cuts=[runtime])


@pytest.mark.parametrize("boundary", ["30%", "80%"])
@pytest.mark.parametrize("middle", **named((two_in_a_row, reads_what_it_wrote, layer_drop, stored_on_one_path)))
def test_a_path_that_nobody_showed_is_captured_from_the_call_that_takes_it(
    middle: Callable[..., Tensor], boundary: str
) -> None:
    twins = Twins(lambda: build(middle), seeded((3, 6), 3), train=True)
    runtime = twins.runtime.resplit(boundary)
    for seed in range(5):
        batch = 2 + seed % 3
        seed_torch(seed)
        with torch.no_grad():
            want = twins.whole(seeded((batch, 6), seed))
        after = state(twins.whole), twins.whole.kept
        seed_torch(seed)
        same(want, runtime.run_suffix(runtime.run_prefix(seeded((batch, 6), seed))))
        same(after, (state(twins.split), twins.split.kept))
        twins.train(seeded((batch, 6), seed + 10), steps=1, cuts=[runtime])
    assert len(runtime.plans) >= 2
