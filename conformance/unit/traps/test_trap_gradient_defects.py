"""Defects of gradients that were found and mended: each test failed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import BoundaryPayload, SplitRuntime
from ariadne.compare import difference
from ariadne.errors import (
    BoundaryError,
    TrainingError,
)
from conformance.unit.defects_kit import prepared, skips
from conformance.unit.trap_kit import Fn, Twins, loss_of, numbers

# Gradients that end in the prefix


def shown_without_grad(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = m.a(x).relu()
    with torch.no_grad():
        z = y[:, :2]
    return m.b(y), z * 2


def test_a_view_made_under_no_grad_may_cross_and_its_gradient_ends_there() -> None:
    twins = Twins(lambda: Fn(shown_without_grad, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), numbers(2, 4))
    twins.train(numbers(3, 4))


def test_an_input_that_is_a_view_and_crosses_still_gets_its_gradient() -> None:
    twins = Twins(lambda: Fn(skips, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), numbers(2, 4).requires_grad_())
    x, y = (numbers(4, 4)[1:].requires_grad_() for _ in range(2))
    assert x._is_view()
    split = twins.runtime.resplit("after:a")
    boundary = split.run_training_prefix(x)
    _, gradients = split.train_suffix(boundary, loss_fn=loss_of)
    split.backward_prefix(boundary, gradients)
    loss_of(twins.whole(y)).backward()
    assert difference(y.grad, x.grad) is None


# Gradients and parameters across the cut


def trained(runtime: SplitRuntime) -> tuple[BoundaryPayload, dict[str, Any]]:
    boundary = runtime.run_training_prefix(numbers(2, 4))
    return boundary, runtime.train_suffix(boundary, loss_fn=loss_of)[1]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda g: g.double(), r"f64\[2, 4\] on cpu; the boundary tensor is f32\[2, 4\] on cpu\. .* converted back"),
        (lambda g: g.bfloat16(), r"bf16\[2, 4\]"),
        (lambda g: g[:1], r"f32\[1, 4\]"),
        (lambda g: g.tolist(), "must be a tensor or None; found list"),
    ],
)
def test_a_gradient_of_another_type_or_shape_is_refused_and_the_boundary_is_not_used_up(
    change: Callable[..., Any], found: str
) -> None:
    _, runtime = prepared(lambda m, x: m.b(m.a(x)))
    boundary, gradients = trained(runtime)
    with pytest.raises(BoundaryError, match=rf"the gradient of 'a' .*{found}"):
        runtime.backward_prefix(boundary, {k: change(g) for k, g in gradients.items()})
    runtime.backward_prefix(boundary, gradients)


def test_under_autocast_the_gradients_have_the_boundarys_own_type() -> None:
    _, runtime = prepared(lambda m, x: m.b(m.a(x)))
    with torch.autocast("cpu", torch.bfloat16):
        boundary, gradients = trained(runtime)
    assert boundary.tensors["a"].dtype is torch.bfloat16
    runtime.backward_prefix(boundary, gradients)


def test_a_parameter_tied_after_the_capture_is_shared_as_one_that_always_was() -> None:
    twins = Twins(lambda: Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), numbers(2, 4))

    def tie(model: Any) -> None:
        model.b.weight = model.a.weight

    twins.both(tie)
    assert twins.runtime.shared_parameters() == [twins.split.a.weight]
    twins.train(numbers(2, 4), runtime=twins.runtime)
    optimizer = torch.optim.SGD(twins.runtime.suffix_parameters(), lr=0.1)
    with pytest.raises(TrainingError, match="uses too"):
        twins.runtime.train_suffix(
            twins.runtime.run_training_prefix(numbers(2, 4)), loss_fn=loss_of, optimizer=optimizer
        )


def test_what_each_side_reads_is_known_anew_once_a_parameter_is_replaced() -> None:
    model, runtime = prepared(lambda m, x: m.b(m.a(x)))
    kept = runtime.prefix_parameters()
    assert kept == runtime.prefix_parameters()
    assert runtime.shared_parameters() == []
    kept.clear()  # a list of the caller's own
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())
    assert {id(p) for p in runtime.prefix_parameters()} == {id(p) for p in model.a.parameters()}
    model.b.weight = model.a.weight
    assert runtime.shared_parameters() == [model.a.weight]
    model.b.bias = None
    assert {id(p) for p in runtime.suffix_parameters()} == {id(model.a.weight)}


def under_two_names(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (m.a(x) * m.b.bias).tanh()
    z = y.to(torch.float32).contiguous()
    return z.sin(), z.sigmoid(), y.tanh(), z.abs(), m.b(y)


@pytest.mark.parametrize("wire", [False, True])
def test_one_tensor_that_crosses_under_two_names_gets_one_gradient_added_in_the_models_order(wire: bool) -> None:
    twins = Twins(lambda: Fn(under_two_names, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), numbers(2, 4))
    split = twins.runtime.resplit("cut:4")
    assert split.candidate.live == ("tanh_1", "to_1")
    boundary = split.run_training_prefix(numbers(2, 4))
    assert len({id(t) for t in boundary.tensors.values()}) == 1
    received = BoundaryPayload.from_bytes(boundary.to_bytes())
    assert list(received.tensors) == list(boundary.tensors)
    assert len({id(t) for t in received.tensors.values()}) == 1
    twins.train(numbers(2, 4), wire=wire)
