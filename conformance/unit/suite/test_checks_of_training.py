"""The check of training sees the faults that it is there for, and gives them their exact status."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from conformance.suite.statuses import Status
from conformance.unit.checks_kit import halved_gradients, louder, no_walk_back, training
from conformance.unit.faults import entry, run, target
from conformance.unit.trap_kit import Fn


def zero_for_none(runtime: Any, boundary: Any, gradients: Any, **options: Any) -> None:
    runtime.backward_prefix(boundary, gradients, **options)
    for p in runtime.model.parameters():
        if p.grad is None and p.requires_grad:
            p.grad = torch.zeros_like(p)


def drawing(runtime: Any, boundary: Any, gradients: Any, **options: Any) -> None:
    runtime.backward_prefix(boundary, gradients, **options)
    torch.rand(1)


def decaying(runtime: Any, boundary: Any, gradients: Any, **options: Any) -> None:
    runtime.backward_prefix(boundary, gradients, **options)
    for p in runtime.model.parameters():
        p.data.mul_(1 + 2**-20)


def deaf_inputs(runtime: Any, *args: Any) -> Any:
    return runtime.run_training_prefix(*(t.detach() for t in args))


def counting_twice(runtime: Any, boundary: Any, targets: Any = None, **options: Any) -> Any:
    found = runtime.train_suffix(boundary, targets, **options)
    runtime.model.norm.num_batches_tracked.add_(1)
    return found


def no_targets(runtime: Any, boundary: Any, targets: Any = None, *, loss_fn: Any, **options: Any) -> Any:
    return runtime.train_suffix(boundary, None, loss_fn=loss_fn, **options)


def other_outputs(runtime: Any, boundary: Any, targets: Any = None, *, loss_fn: Any, **options: Any) -> Any:
    return runtime.train_suffix(
        boundary,
        targets,
        loss_fn=lambda output, given: loss_fn({**output, "top": output["top"].float()}, given),
        **options,
    )


TRAIN = {
    "a prefix without gradients": (training(backward_prefix=no_walk_back), Status.FAIL_STATE),
    "zero for None": (training(backward_prefix=zero_for_none), Status.FAIL_STATE),
    "gradients a little off": (training(backward_prefix=halved_gradients), Status.FAIL_STATE),
    "parameters a little off": (training(backward_prefix=decaying), Status.FAIL_STATE),
    "a draw": (training(backward_prefix=drawing), Status.FAIL_RNG),
    "inputs without gradients": (training(run_training_prefix=deaf_inputs), Status.FAIL_STATE),
    "a loss a little off": (training(train_suffix=louder), Status.FAIL_ACCURACY),
    "no targets": (training(train_suffix=no_targets), Status.FAIL_STRUCTURE),
    "other outputs to take the loss of": (training(train_suffix=other_outputs), Status.FAIL_STRUCTURE),
}


@pytest.mark.parametrize(("methods", "status"), TRAIN.values(), ids=TRAIN.keys())
def test_train_sees(methods: Any, status: Status) -> None:
    assert run("train", target(**methods)).status is status


@pytest.mark.parametrize(
    ("methods", "status"),
    [
        (training(run_training_prefix=deaf_inputs), Status.FAIL_STRUCTURE),
        (training(train_suffix=counting_twice), Status.FAIL_STATE),
    ],
    ids=["inputs without gradients", "statistics moved twice"],
)
def test_compiled_training_sees_what_is_left_behind(methods: Any, status: Status) -> None:
    assert run("train", target(**methods), mode="train", backend="eager", steps=1).status is status


def test_train_sees_what_goes_wrong_in_a_later_step_only() -> None:
    calls = itertools.count()

    def stale(runtime: Any, boundary: Any, gradients: Any, **options: Any) -> None:
        act = halved_gradients if next(calls) == 2 else type(runtime).backward_prefix
        act(runtime, boundary, gradients, **options)

    found = run("train", target(backward_prefix=stale))
    assert found.status is Status.FAIL_STATE
    assert "step 2" in found.reason


def keeping(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As LeViT in eval mode: what the first call made of a weight stays, with its graph, so a second backward pass fails."""
    if "made" not in self.kept:
        self.kept["made"] = self.linear.weight.sum(0).exp()
    return self.linear(x) * self.kept["made"]


def test_steps_before_the_one_in_which_the_whole_raises_are_held() -> None:
    made = entry(lambda: Fn(keeping, linear=nn.Linear(6, 6), kept={}))
    sound = run("train", made=made)
    assert sound.status is Status.ERROR_EAGER
    assert "in step 1, over what it keeps of the calls before: Trying to backward through the graph" in sound.reason
    assert len(sound.facts["losses"]) == 1
    wrong = run("train", target(backward_prefix=halved_gradients), made)
    assert wrong.status is Status.FAIL_STATE
    assert "step 0" in wrong.reason
