"""Autocast: bfloat16 on the CPU around the split against the same around the whole, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import model_zoo
from ariadne import SplitRuntime
from conformance.checks.base import (
    PASSED,
    Check,
    at,
    hold,
    hold_outcomes,
    hold_rng,
    hold_state,
    no_grad,
    outcome,
    refuses,
)
from conformance.suite import device
from conformance.suite.bench import REFERENCE, Bench, Split
from conformance.suite.cases import Case
from conformance.suite.oracle import deterministic
from conformance.suite.state import seed_all, undisturbed
from conformance.suite.statuses import Finding, Status, Stop

JUDGED_AGAIN = 4  # times, where the split differs from a whole that did not differ from itself


def run(bench: Bench, case: Case) -> Finding:
    """A forward, and a training step whose backward runs outside, as torch's documentation has it.

    A split that refuses the step because of autocast's cache must take it without the cache: then it is "unsupported".
    """
    bench.judge(case.training)
    _forward(bench, case)
    _hold_one_side(bench, case)
    if not bench.trainable(case.training):
        return PASSED
    try:
        _train(bench, case, cached=True)
    except Exception as error:
        if not refuses(error):
            raise
        _train(bench, case, cached=False)
        raise Stop(
            Status.UNSUPPORTED, f"it trains as the whole does, but only without autocast's cache: {error}"[:600]
        ) from error
    return PASSED


def _autocast(cached: bool = True) -> torch.autocast:
    return torch.autocast(device.chosen(), torch.bfloat16, cache_enabled=cached)


def _forward(bench: Bench, case: Case) -> None:
    split = bench.split(case["cut"], case.training)
    twin = bench.whole(case.training)

    def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _autocast():
            return function(*args, **kwargs)

    whole = outcome(lambda: around(no_grad, twin, bench.inputs(REFERENCE)), REFERENCE)
    args, kwargs = bench.inputs(REFERENCE)
    found = outcome(lambda: around(split.forward, *args, **kwargs), REFERENCE)
    hold_outcomes(whole, found)
    hold("output", whole.value, found.value, at(split))
    hold_state(twin, split, bench, at(split))
    hold_rng(whole, found, at(split))


def _hold_one_side(bench: Bench, case: Case) -> None:
    """Stop where a suffix takes a boundary of a prefix that ran under another autocast, as no call of the whole model does."""
    split = bench.split(case["cut"], case.training)
    if not isinstance(
        split.runtime, SplitRuntime
    ):  # a forward that waits does so under its own; of others nothing is promised
        return
    for before, after in ((nullcontext, _autocast), (_autocast, nullcontext)):
        args, kwargs = bench.inputs(REFERENCE)
        seed_all(REFERENCE)
        with before():
            boundary = split.runtime.run_prefix(*args, **kwargs)
        try:
            with after():
                split.runtime.run_suffix(boundary)
        except Exception as error:
            if type(error).__name__ != "BoundaryError":
                raise
        else:
            raise Stop(Status.FAIL_STATE, f"a suffix runs under another autocast than its prefix, {at(split)}")


def _train(bench: Bench, case: Case, *, cached: bool) -> None:
    split = bench.split(case["cut"], case.training, trained=True)
    twin = bench.whole(case.training)

    def whole() -> torch.Tensor:
        args, kwargs = bench.inputs(REFERENCE)
        with _autocast(cached):
            loss = bench.entry.loss(twin(*args, **kwargs))
        loss.backward()
        return loss.detach()

    expected, found = outcome(whole, REFERENCE), outcome(lambda: _halves(bench, split, cached), REFERENCE)
    where = f"training, {at(split)}"
    hold_outcomes(expected, found)
    _judge(bench, case.training, cached)
    try:
        hold("loss", expected.value, found.value, where)
        hold_state(twin, split, bench, where)
    except Stop:  # memory that nobody wrote may hold the same numbers twice
        for _ in range(JUDGED_AGAIN):
            _judge(bench, case.training, cached)
        raise
    hold_rng(expected, found, where)


def _judge(bench: Bench, training: bool, cached: bool) -> None:
    """Stop `nondeterministic` where the whole model is so in bfloat16 alone: some kernels read memory that nobody wrote."""

    def step() -> Any:
        model = bench.whole(training)
        args, kwargs = bench.inputs(REFERENCE)
        seed_all(REFERENCE)
        with _autocast(cached):
            loss = bench.entry.loss(model(*args, **kwargs))
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    with undisturbed():
        deterministic(step, "the whole model, trained under autocast")


def _halves(bench: Bench, split: Split, cached: bool) -> torch.Tensor:
    args, kwargs = bench.inputs(REFERENCE)
    with _autocast(cached):
        boundary = split.runtime.run_training_prefix(*args, **kwargs)
        loss, gradients = split.runtime.train_suffix(boundary, loss_fn=lambda output, _: bench.entry.loss(output))
    split.runtime.backward_prefix(boundary, gradients)
    loss_value: torch.Tensor = loss
    return loss_value


def applies(entry: model_zoo.Entry) -> bool:
    """Whether the model's step under autocast equals itself, so that a split can be held against it."""
    return "no-autocast" not in entry.tags


CHECK = Check("autocast", ("cut", "mode"), "autocast around the halves is autocast around the whole", run, applies)
