"""Turns among threads: a backward pass that hooks leaves runs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.runtime.turns import TURNS, Turns
from ariadne.runtime.waiting import without_hooks
from conformance.unit.trap_kit import numbers


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_walks_run_side_by_side_and_one_that_is_alone_waits_for_all() -> None:
    turns, inside, go, seen = Turns(), threading.Barrier(3), threading.Event(), []

    def walk() -> None:
        turns.enter()
        inside.wait(10)
        go.wait(10)
        seen.append("walk")
        turns.leave()

    def alone() -> None:
        with turns.alone():
            seen.append("alone")

    walks = [started(walk) for _ in range(2)]
    inside.wait(10)  # both are in at once
    last = started(alone)
    last.join(0.2)
    assert seen == []
    go.set()
    for thread in (*walks, last):
        thread.join(10)
    assert seen == ["walk", "walk", "alone"]


def test_who_wants_to_be_alone_goes_before_walks_that_come_after() -> None:
    turns, seen, go = Turns(), [], threading.Event()
    turns.enter()

    def alone() -> None:
        with turns.alone():
            seen.append("alone")
            go.wait(10)

    def walk() -> None:
        turns.enter()
        seen.append("walk")
        turns.leave()

    first = started(alone)
    while not turns._waiting:
        first.join(0.01)
    second = started(walk)
    second.join(0.2)
    assert seen == []
    turns.leave()
    second.join(0.2)
    assert seen == ["alone"]
    go.set()
    first.join(10)
    second.join(10)
    assert seen == ["alone", "walk"]


def test_a_walk_within_a_walk_and_an_error_within_leave_all_as_it_was() -> None:
    turns = Turns()
    turns.enter()
    with turns.alone():
        turns.enter()
        with turns.alone():
            pass
        turns.leave()
    turns.leave()
    try:
        with turns.alone():
            raise KeyError
    except KeyError:
        pass
    assert (turns._inside, turns._waiting) == ({}, 0)
    thread = started(lambda: turns.enter())
    thread.join(10)
    assert not thread.is_alive()


def test_a_split_s_backward_passes_wait_for_one_that_hooks_leaves() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    runtime = prepare_split(model, (numbers(2, 6),), split=SplitSpec("50%"))
    boundaries = [runtime.run_training_prefix(numbers(2, 6)) for _ in range(2)]

    def loss_fn(output: torch.Tensor, _: object) -> torch.Tensor:
        return output.sum()

    def suffix() -> None:
        runtime.train_suffix(boundaries[0], loss_fn=loss_fn)

    _, gradients = runtime.train_suffix(boundaries[1], loss_fn=loss_fn)
    for work in (suffix, lambda: runtime.backward_prefix(boundaries[1], gradients)):
        before = [p.grad is None or p.grad.clone() for p in model.parameters()]
        with without_hooks(()):
            thread = started(work)
            thread.join(0.3)
            assert thread.is_alive()
            now = [p.grad is None or p.grad for p in model.parameters()]
            assert all(a is b or torch.equal(a, b) for a, b in zip(before, now, strict=True))
        thread.join(10)
        assert not thread.is_alive()
    assert not TURNS._inside
