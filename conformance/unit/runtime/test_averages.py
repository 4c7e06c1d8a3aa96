"""Averages that forward keeps in a buffer: of what is detached they get no graph, and a step goes on across any cut."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ariadne import prepare_split
from ariadne.errors import TrainingError
from conformance.unit.runtime.test_paths import Net, X, build, named
from conformance.unit.trap_twins import Twins, seeded


def averages(m: Net, h: Tensor, taken: Tensor) -> Tensor:
    m.norm.running_mean.detach_()
    m.norm.running_mean.mul_(0.5).add_(taken, alpha=0.5)
    return m.right(m.left(h) + m.norm.running_mean)


def of_detached(m: Net, h: Tensor) -> Tensor:
    return averages(m, h, h.detach().mean(0))


def of_data(m: Net, h: Tensor) -> Tensor:
    return averages(m, h, h.data.sum(0).tanh())


def of_no_grad(m: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        taken = h.mean(0) * m.left.bias
    return averages(m, h, taken)


def of_written_with_a_graph(m: Net, h: Tensor) -> Tensor:
    taken = h.clone().detach()
    taken.add_(m.left.bias)
    return averages(m, h, taken.mean(0))


def of_what_the_model_holds(m: Net, h: Tensor) -> Tensor:
    mean, weight = m.norm.running_mean, m.norm.running_var
    mean.copy_(mean + (h.detach().mean(0) - mean) * weight)
    return m.right(m.left(h) + mean)


def into_data(m: Net, h: Tensor) -> Tensor:
    m.norm.running_mean.data.mul_(0.5).add_(h.mean(0), alpha=0.5)
    return m.right(m.left(h) + m.norm.running_mean)


OF_ALL = (of_detached, of_data, of_no_grad, of_written_with_a_graph, of_what_the_model_holds, into_data)


@pytest.mark.parametrize("middle", **named(OF_ALL))
def test_an_average_of_what_is_detached_gets_no_graph(middle: Callable[..., Tensor]) -> None:
    twins = Twins(lambda: build(middle), X, train=True)
    cuts = twins.cuts()
    told: list[str] = []
    for runtime in cuts:
        runtime.model.norm.running_mean.detach_()  # as forward does, but a graph can't be copied
        try:
            copy.deepcopy(runtime).run_training_prefix(X)
        except TrainingError as error:
            told.append(str(error))
        else:
            twins.train(seeded((3, 6), 1), steps=2, cuts=[runtime])
    assert all("gets a graph before the cut" in error for error in told)
    assert bool(told) is (middle is of_written_with_a_graph)


def test_a_buffer_that_came_to_have_a_graph_is_told_where_others_are_made_of_it() -> None:
    runtime = prepare_split(build(of_what_the_model_holds), (X,), split="after:left")
    assert {"norm_running_mean", "norm_running_var"} <= {*runtime.candidate.ungraphed}
    runtime.model.norm.running_var.requires_grad_()
    with pytest.raises(TrainingError, match=r"'norm_running_var'.*had none at capture.*Detach it"):
        runtime.run_training_prefix(X)
    runtime.model.norm.running_var.requires_grad_(False)
    runtime.run_training_prefix(X)
