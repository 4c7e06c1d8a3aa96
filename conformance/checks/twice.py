"""Twice: a payload that is used again, and payloads that are consumed in another order than they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ariadne import PythonSplit
from ariadne.errors import BoundaryError
from conformance.checks.base import PASSED, Check, at, hold, hold_moved, hold_state, no_grad
from conformance.suite.bench import REFERENCE, Bench, Split
from conformance.suite.cases import Case
from conformance.suite.compare import difference, frozen
from conformance.suite.state import rng_state, seed_all, set_rng_state
from conformance.suite.statuses import Finding, Status, Stop

SEEDS = (1, 2)


class Streams:
    """One random stream for each batch in flight, so that halves of several can be run in any order."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def run(self, seed: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function where that batch's stream stands."""
        if seed in self.states:
            set_rng_state(self.states[seed])
        else:
            seed_all(seed)
        found = function(*args, **kwargs)
        self.states[seed] = rng_state()
        return found


def run(bench: Bench, case: Case) -> Finding:
    """The suffix twice on one payload; two payloads consumed in the other order; two training steps in flight."""
    bench.judge(case.training)
    _one_payload(bench, case)
    try:
        _two_payloads(bench, case)
        if bench.trainable(case.training):
            _two_steps(bench, case)
    except BoundaryError as error:
        raise Stop(Status.UNSUPPORTED, f"one boundary at a time: {error}"[:600]) from error
    return PASSED


def _one_payload(bench: Bench, case: Case) -> None:
    split = bench.split(case["cut"], case.training)
    args, kwargs = bench.inputs(REFERENCE)
    seed_all(0)
    boundary = split.runtime.run_prefix(*args, **kwargs)
    stood = rng_state()
    before = frozen(boundary.raw)
    first = split.runtime.run_suffix(boundary)
    kept = frozen(first)
    if isinstance(split.runtime, PythonSplit) and difference(before, boundary.raw):
        _hold_spent(split, boundary)
    hold_moved(before, boundary.raw, f"the payload after one suffix, {at(split)}")
    if not case.training:  # buffers that a first call moved would show in the second
        set_rng_state(stood)
        second = split.runtime.run_suffix(boundary)
        hold("second output", kept, frozen(second), at(split))
        hold("first output, after the second suffix", kept, frozen(first), at(split))
        hold_moved(before, boundary.raw, f"the payload after two suffixes, {at(split)}")


def _hold_spent(split: Split, boundary: Any) -> None:
    """A forward that waits holds what crosses itself; where it writes into that, a second run must be refused."""
    try:
        split.runtime.run_suffix(boundary)
    except BoundaryError as error:
        raise Stop(Status.UNSUPPORTED, f"a boundary is run once: {error}"[:600]) from error


def _two_payloads(bench: Bench, case: Case) -> None:
    split = bench.split(case["cut"], case.training)
    expected = {}
    twin = bench.whole(case.training)
    for seed in SEEDS:
        seed_all(seed)
        expected[seed] = no_grad(twin, bench.inputs(REFERENCE, seed))
    streams, boundaries = Streams(), {}
    for seed in SEEDS:
        args, kwargs = bench.inputs(REFERENCE, seed)
        boundaries[seed] = streams.run(seed, split.runtime.run_prefix, *args, **kwargs)
    found, kept = {}, {}
    for seed in reversed(SEEDS):
        found[seed] = streams.run(seed, split.runtime.run_suffix, boundaries[seed])
        kept[seed] = frozen(found[seed])
        if not bench.order_matters(case.training):
            hold(f"output of batch {seed}, consumed in the other order", expected[seed], found[seed], at(split))
    for seed in SEEDS:
        hold(f"output of batch {seed}, once both have run", kept[seed], frozen(found[seed]), at(split))
    if not case.training and not bench.left_by_the_last(case.training):
        hold_state(twin, split, bench, at(split))


def _two_steps(bench: Bench, case: Case) -> None:
    split = bench.split(case["cut"], case.training, trained=True)
    twin = bench.whole(case.training)
    losses = {}
    try:
        for seed in SEEDS:
            seed_all(seed)
            args, kwargs = bench.inputs(REFERENCE, seed)
            losses[seed] = bench.entry.loss(twin(*args, **kwargs))
        for seed in SEEDS:
            losses[seed].backward()
    except RuntimeError as error:  # a forward that writes into what the one before saved for its backward
        bench.facts["whole_takes_no_two_in_flight"] = str(error)[:200]
        return
    streams, boundaries, gradients = Streams(), {}, {}
    for seed in SEEDS:
        args, kwargs = bench.inputs(REFERENCE, seed)
        boundaries[seed] = streams.run(seed, split.runtime.run_training_prefix, *args, **kwargs)

    def train(boundary: Any) -> tuple[torch.Tensor, Any]:
        return split.runtime.train_suffix(boundary, loss_fn=lambda output, _: bench.entry.loss(output))

    for seed in reversed(SEEDS):
        loss, gradients[seed] = streams.run(seed, train, boundaries[seed])
        if not bench.order_matters(case.training):
            hold(f"loss of batch {seed}, two in flight", losses[seed].detach(), loss, at(split))
    for seed in SEEDS:
        split.runtime.backward_prefix(boundaries[seed], gradients[seed])
    if not bench.order_matters(case.training):
        _hold_gradients(twin, split)


def _hold_gradients(twin: torch.nn.Module, split: Split) -> None:
    expected = {name: p.grad for name, p in twin.named_parameters()}
    found = {name: p.grad for name, p in split.model.named_parameters()}
    hold_moved(expected, found, f"gradients of two batches in flight, {at(split)}")


CHECK = Check("twice", ("cut", "mode"), "a payload can be used again, and several be in flight, in any order", run)
