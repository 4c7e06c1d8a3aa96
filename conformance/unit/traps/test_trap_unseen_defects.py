"""Defects of writes, of what no op shows, and of equal values, found and mended: each test failed before."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, graph
from torch.utils.checkpoint import checkpoint

from ariadne import BoundaryPayload, SplitSpec, prepare_split_replay, tree
from ariadne.capture import Example
from ariadne.capture.generalize import disagreement
from ariadne.capture.observed import observe
from ariadne.compare import difference
from ariadne.errors import (
    AriadneError,
    BoundaryError,
    ModuleError,
    UnsupportedError,
    WitnessError,
)
from conformance.unit.defects_kit import equal_at, first_six, parts, prepared, skips
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import Fn, Twins, numbers


def test_an_input_written_into_before_the_suffix_has_run_is_refused_where_it_crosses() -> None:
    model, runtime = prepared(skips)
    x = numbers(2, 4)
    with torch.no_grad():
        expected = model(x)
    split = runtime.resplit("after:a")
    boundary, training = split.run_prefix(x), split.run_training_prefix(x)
    assert difference(expected, split.run_suffix(boundary)) is None
    sent = BoundaryPayload.from_bytes(boundary.to_bytes())
    x.mul_(2)
    for call in (
        lambda: split.run_suffix(boundary),
        lambda: split.train_suffix(training, loss_fn=lambda out, _: out[0].sum()),
        boundary.to_bytes,
    ):
        with pytest.raises(
            BoundaryError, match=r"^'args_0' crosses .* \(cut:\d\) .* written into .* hand a copy to the prefix"
        ):
            call()
    assert difference(expected, split.run_suffix(sent)) is None


def test_an_output_that_is_the_boundary_itself_written_into_is_refused_the_next_time() -> None:
    _, runtime = prepared(skips)
    split = runtime.resplit("after:a")
    boundary = split.run_prefix(numbers(2, 4))
    split.run_suffix(boundary)[1].zero_()
    with pytest.raises(BoundaryError, match=r"^'a' crosses"):
        split.run_suffix(boundary)


def test_a_boundary_that_no_one_else_can_reach_may_be_changed_on_its_way() -> None:
    model, runtime = prepared(lambda m, x: m.b(m.a(x)))
    boundary = runtime.run_prefix(numbers(2, 4))
    boundary.tensors["a"].zero_()
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(boundary), model.b(torch.zeros(2, 4)))


def test_tensors_made_under_inference_mode_cross_as_before() -> None:
    model, runtime = prepared(skips)
    with torch.inference_mode():
        x = numbers(2, 4)
        split = runtime.resplit("after:a")
        assert difference(model(x), split.run_suffix(split.run_prefix(x))) is None


# What no op shows


def between(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, x: m.b(function(m, m.a(x)))


@pytest.mark.parametrize(
    "way", [torch.jit.script, lambda m: torch.jit.trace(m, numbers(2, 4))], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_torchscript_module_is_refused_by_its_name(way: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), way(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    with pytest.raises(UnsupportedError, match=r"^'1' is a TorchScript module \(\w+\).* put the module that it was"):
        prepare_split(model, (numbers(2, 4),), split="50%")


def dual(m: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, x) * 2).tangent


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda m, x: torch.vmap(lambda y: y * 2)(x), r"torch\.func \(vmap\) in the model itself"),
        (lambda m, x: torch.vmap(m.b)(x), r"torch\.func \(vmap\) in 'b'"),
        (lambda m, x: torch.func.grad(lambda y: y.pow(3).sum())(x), r"torch\.func \(grad\)"),
        (lambda m, x: torch.func.jacrev(lambda y: (y * 2).sum(0))(x).sum((0, 1)), r"torch\.func"),
        (lambda m, x: torch.func.jvp(lambda y: y * 2, (x,), (x,))[1], r"torch\.autograd\.forward_ad"),
        (dual, r"torch\.autograd\.forward_ad in the model itself"),
    ],
)
def test_a_transform_in_forward_is_refused_by_its_name_and_place(function: Callable[..., Any], named: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"{named}.* use torch\.autograd\.grad|{named}.*or with torch\.autograd\.grad"
    ):
        prepared(between(function))


def slope(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad((m.b.weight * (y.pow(3) + y.tanh())[:, None]).sum(), y, create_graph=True)[0]


def test_gradients_taken_inside_forward_are_part_of_the_plan_where_ops_show_all_of_it() -> None:
    twins = Twins(lambda: Fn(between(slope), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), numbers(2, 4))
    twins.replay(numbers(3, 4))
    twins.train(numbers(3, 4))


def slope_of_a_part(m: Any, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        y = m.a(x.detach() * (1 if x.sum().item() else 2)).detach().requires_grad_()
        (found,) = torch.autograd.grad(m.b(y).pow(3).sum(), y)
    return found + m.b(x)


@pytest.mark.parametrize("part", [nn.LayerNorm, nn.Linear], ids=lambda kind: kind.__name__)
def test_gradients_taken_inside_forward_through_composite_ops_are_part_of_the_plan(part: Any) -> None:
    made = nn.Linear(4, 4) if part is nn.Linear else part(4)
    twins = Twins(lambda: Fn(slope_of_a_part, a=nn.Linear(4, 4), b=copy.deepcopy(made)), numbers(2, 4))
    twins.replay(numbers(3, 4))


class FirstOf(nn.GRU):
    """What a recurrent layer gives at each step, by a kernel that keeps what its derivative reads."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)[0]


def test_gradients_taken_inside_forward_through_ops_that_keep_tensors_to_themselves_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"takes gradients in the model itself .* write the derivative out"):
        prepare_split(Fn(slope_of_a_part, a=nn.Linear(4, 4), b=FirstOf(4, 4)), (numbers(2, 4),), split="50%")


@pytest.mark.parametrize("before", [None, torch.ones(4, 4)], ids=["none before", "one before"])
def test_a_backward_in_forward_that_leaves_gradients_on_parameters_is_refused(before: torch.Tensor | None) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            m.b(x.detach()).sum().backward()
        return m.b(m.a(x))

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight.grad = before
    with pytest.raises(
        UnsupportedError, match=r"backward\(\) in the model itself, .* on 'b\.(weight|bias)'.* torch\.autograd\.grad"
    ):
        prepare_split(model, (numbers(2, 4),), split="50%")
    assert model.b.weight.grad is before
    assert before is None or torch.equal(before, torch.ones(4, 4))


def with_saved_tensor_hooks(m: Any, x: torch.Tensor) -> torch.Tensor:
    with graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return torch.tanh(x)


def with_node_hook(name: str) -> Callable[..., Any]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        if y.grad_fn is not None:
            getattr(y.grad_fn, name)(lambda *gradients: None)
        return y

    return forward


def with_graph_edge(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    if y.requires_grad:
        graph.get_gradient_edge(y).node.register_prehook(lambda gradients: None)
    return y


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (with_saved_tensor_hooks, "enters torch.autograd.graph.saved_tensors_hooks"),
        (with_node_hook("register_hook"), "calls grad_fn.register_hook"),
        (with_node_hook("register_prehook"), "calls grad_fn.register_prehook"),
        (with_graph_edge, "calls torch.autograd.graph.get_gradient_edge"),
    ],
)
def test_a_hook_on_the_autograd_graph_is_refused_for_training_and_of_no_account_without(
    function: Callable[..., Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"forward {named} in the model itself, .* use prepare_split_replay"):
        prepared(between(function))
    model = Fn(between(function), a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    equal_at((1, 2, 3), model, prepare_split_replay(model, (numbers(2, 4),), split="50%"))


def saved_on_cpu(m: Any, x: torch.Tensor) -> torch.Tensor:
    with graph.save_on_cpu():
        return torch.tanh(x)


@pytest.mark.parametrize(
    "function", [saved_on_cpu, lambda m, x: checkpoint(lambda y: torch.tanh(m.b(y)), x, use_reentrant=False)]
)
def test_hooks_of_torch_that_change_no_gradient_are_let_through(function: Callable[..., Any]) -> None:
    twins = Twins(lambda: Fn(between(function), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), numbers(2, 4))
    twins.train(numbers(3, 4))


# Values that are equal, and yet others


@pytest.mark.parametrize(
    ("captured", "other"), [(0.0, -0.0), (1, True), (1, 1.0), (float("nan"), 0.0), (0j, complex(0, -0.0))]
)
def test_a_literal_input_must_be_the_same_in_type_and_bits(captured: Any, other: Any) -> None:
    def forward(m: Any, x: torch.Tensor, scale: Any) -> Any:
        return m.b(m.a(x)) * (m.a(x).detach() > 0) * scale

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    x = numbers(2, 4)
    runtime = prepare_split(model, (x, captured), split="50%")
    for given in (captured, other, captured):
        assert difference(model(x, given).detach(), runtime.run_suffix(runtime.run_prefix(x, given))) is None
    assert len(runtime.plans) == 2


def test_a_number_that_changes_with_the_batch_is_not_taken_for_the_batch() -> None:
    def forward(m: Any, x: torch.Tensor, scale: int) -> Any:
        if len([*range(x.shape[0])]) % 2:  # so that plans are captured for each batch, and held against each other
            return m.b(m.a(x)) * scale
        return m.b(m.a(x)) * scale + 0.0

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    runtime = prepare_split(model, (numbers(2, 4), 2), split="50%")
    for batch, scale in ((2, 2), (3, 3), (4, 4), (5, 3), (4, 2)):
        x = numbers(batch, 4)
        assert difference(model(x, scale).detach(), runtime.run_suffix(runtime.run_prefix(x, scale))) is None


@pytest.mark.parametrize(
    ("captured", "other"), [(0.0, -0.0), (1, 1.0), ([1, 2], [1, 2.0]), ({"by": 0.0}, {"by": -0.0})]
)
def test_an_attribute_that_forward_reads_must_be_the_same_in_type_and_bits(captured: Any, other: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        scale = next(iter(tree.leaves(m.scale)))
        return m.b(m.a(x)), torch.arange(4) * scale

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), scale=captured).eval()
    runtime = prepare_split(model, (numbers(2, 4),), split="50%")
    model.scale = copy.deepcopy(captured)
    equal_at((2, 3), model, runtime)
    model.scale = other
    with pytest.raises(ModuleError, match="attribute 'scale"):
        runtime.run_prefix(numbers(2, 4))


@pytest.mark.parametrize("mode", ["generated_eager", "debug_interpreter"])
def test_a_number_read_out_of_a_tensor_must_be_the_same_in_every_bit(mode: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.b(m.a(x)) * math.copysign(1.0, x[0, 0].item())

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    x = numbers(2, 4)
    x[0, 0] = 0.0
    runtime = prepare_split(model, (x,), split=SplitSpec("50%", max_paths=1), mode=mode)
    runtime.run_suffix(runtime.run_prefix(x))
    x[0, 0] = -0.0
    with pytest.raises(WitnessError, match=r"-0\.0"):
        runtime.run_suffix(runtime.run_prefix(x))


def test_a_default_of_an_op_is_left_out_only_where_it_is_the_same_in_every_bit() -> None:
    model, runtime = prepared(
        lambda m, x: m.b(nn.functional.threshold(m.a(x), 0.0, -0.0).sign() + x.new_full((4,), -0.0))
    )
    equal_at((2, 3), model, runtime)


def test_runs_that_differ_in_the_sign_of_a_zero_or_the_type_of_a_number_disagree() -> None:
    plan = prepared(lambda m, x: m.b(m.a(x)) * 0.0)[1].plan
    for by, agrees in ((0.0, True), (-0.0, False), (0, False), (False, False)):
        model = Fn(lambda m, x, by=by: m.b(m.a(x)) * by, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
        seen = observe(model, Example.of((numbers(2, 4),), {}), 2, "B", True)
        assert (disagreement(plan, seen.plan) is None) is agrees, by


def test_results_that_differ_in_the_sign_of_a_zero_or_in_type_differ() -> None:
    for whole, split in [(0.0, -0.0), (1, True), (1, 1.0), ([0j], [complex(0.0, -0.0)])]:
        assert difference(whole, split)
    assert difference((float("nan"), {1: "a"}), (float("nan"), {1: "a"})) is None


def test_modules_may_be_called_as_the_helpers_of_generated_code() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.own(x)
        return m.same_data(m.identical(y.relu()) * m.broken_witness(x).sum(0)).add_(y)

    parts = {name: nn.Linear(4, 4) for name in ("own", "same_data", "identical", "broken_witness", "autocast")}
    twins = Twins(lambda: Fn(forward, **parts), numbers(2, 4))
    twins.replay(numbers(3, 4))


# The plan as data


def test_a_plan_as_json_has_the_signature_of_the_plan() -> None:
    for function in (lambda m, x: m.b(m.a(x)) * torch.tensor([1.0, -0.0, float("inf"), 2.0]), parts, first_six):
        plan = prepared(function)[1].plan
        text = json.dumps(plan.to_json(), sort_keys=True)
        assert hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()[:16] == plan.signature
        assert prepared(function)[1].plan.signature == plan.signature


# What to do


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (
            lambda r: r.run_prefix(numbers(2, 3, 4)),
            r"of rank 2; found f32\[2, 3, 4\] on cpu\. Reshape it, or prepare again",
        ),
        (lambda r: r.run_prefix(3), r"found int\. Pass a tensor, or prepare again"),
        (lambda r: r.resplit("after:b#3"), r"calls it 2 time\(s\); write 'after:b#2' for the last"),
        (lambda r: r.resplit("cut:99"), r"has cuts 1 to \d; take one of these"),
    ],
)
def test_an_error_says_what_to_do(call: Callable[..., Any], found: str) -> None:
    _, runtime = prepared(lambda m, x: m.b(m.b(m.a(x))))
    with pytest.raises(AriadneError, match=found):
        call(runtime)
