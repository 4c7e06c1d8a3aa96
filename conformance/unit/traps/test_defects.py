"""Defects that were found and mended: each test failed before."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, graph
from torch.utils.checkpoint import checkpoint

from ariadne import BoundaryPayload, SplitRuntime, SplitSpec, prepare_split, prepare_split_replay, tree
from ariadne.capture import Example
from ariadne.capture.generalize import disagreement
from ariadne.capture.observed import observe
from ariadne.compare import difference
from ariadne.errors import (
    AriadneError,
    BatchError,
    BoundaryError,
    InputError,
    ModuleError,
    TrainingError,
    UnsupportedError,
    WitnessError,
)
from ariadne.plan import Batches, Expr, where
from conformance.unit.trap_kit import Fn, Twins, loss_of, numbers


def prepared(function: Callable[..., Any], batch: int = 2, upto: int = 12) -> tuple[nn.Module, SplitRuntime]:
    torch.manual_seed(0)
    model = Fn(function, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    return model, prepare_split(model, (numbers(batch, 4),), split=SplitSpec("50%", dynamic_batch=(1, upto)))


def equal_at(batches: Iterable[int], model: nn.Module, runtime: SplitRuntime) -> None:
    for batch in batches:
        x = numbers(batch, 4, seed=batch)
        with torch.no_grad():
            expected = model(x)
        assert difference(expected, runtime.run_suffix(runtime.run_prefix(x))) is None, batch


# Sizes that follow the batch in steps


def parts(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.stack([p.sum(0) for p in m.a(x).split(5)]))


def pieces(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.cat([2 * p for p in m.a(x).chunk(3)]))


def rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.stack(m.a(x).unbind(0)[::-1]))


def given_back(m: Any, x: torch.Tensor) -> Any:
    return m.b(m.a(x)).split(5)


def first_six(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)[:6]
    return m.b(kept.sum(0) / kept.shape[0])


def six_of_a_column(m: Any, x: torch.Tensor) -> torch.Tensor:  # torch skips a slice that reaches to the end
    return m.b(m.a(x) * m.a(x)[:6, 1].sum())


def written_to_six(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)
    kept[:6] = kept[..., 1:2][:6]
    return m.b(kept)


def written_to_six_of_a_column(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)
    kept[:6, 1] = kept[:6, 0]
    return m.b(kept)


def six_overwritten(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)
    kept[:6] = 0.5
    return m.b(kept)


class Six(torch.autograd.Function):
    """What an op of Python makes is not seen by torch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x[:6].clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def six_of_a_function(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = Six.apply(m.a(x))
    return m.b(kept.sum(0) / kept.shape[0])


@torch.jit.script
def pick(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() if x.shape[0] > 6 else x.relu()


def scripted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(pick(m.a(x)))


def parameter_made(m: Any, x: torch.Tensor) -> torch.Tensor:
    p = nn.Parameter(m.a(x), requires_grad=False)
    return m.b(p.tanh() if p.shape[0] > 6 else p.relu())


def number_of_numpys(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    return m.b(y.tanh() if np.int64(6) < x.shape[0] else y.relu())


def write_that_may_fail(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).tanh()
    with suppress(IndexError):
        y[6] = 0.5
    return m.b(y)


def last_six(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)[-6:]
    return m.b(kept.sum(0) / kept.shape[0])


def reads_data(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(m: Any, x: torch.Tensor) -> Any:  # which the symbolic way can't follow
        return x if m.a.weight.sum().item() > 100 else function(m, x)

    return forward


@pytest.mark.parametrize("batch", [2, 6])
@pytest.mark.parametrize("way", [lambda f: f, reads_data], ids=["symbolic", "observed"])
@pytest.mark.parametrize(
    "function",
    [
        parts,
        pieces,
        rows,
        given_back,
        first_six,
        last_six,
        six_of_a_column,
        six_of_a_function,
        six_overwritten,
        scripted,
        parameter_made,
        number_of_numpys,
        write_that_may_fail,
        written_to_six,
        written_to_six_of_a_column,
    ],
)
def test_a_size_or_a_number_of_parts_that_follows_the_batch_in_steps_is_right_at_every_batch(
    function: Callable[..., Any], way: Callable[..., Any], batch: int
) -> None:
    equal_at((1, 5, 6, 7, 11, 5), *prepared(way(function), batch))


def test_an_excluded_batch_comes_with_the_op_that_makes_other_sizes_there() -> None:
    _, runtime = prepared(parts)
    assert runtime.plan.batches == Batches(((1, 5),))
    assert any("batch 6 to 10: op 1 makes 2 tensor(s) there, 1 in the plan" in e for e in runtime.plan.excluded)
    _, runtime = prepared(first_six)
    assert runtime.plan.batches == Batches(((1, 6),))
    assert any("batch 7 to 12: op 1 makes sizes [6, 4] there" in e for e in runtime.plan.excluded)


# The range of batches


def test_questions_about_the_batch_are_solved_as_they_are_asked_one_by_one() -> None:
    sizes = [b for b in range(1, 60) if b % 7]
    for text in ("B == 9", "3*B - 12 != 0", "7 < B", "2*B + 3 >= B + 17", "197 % (2*B) != 0", "(B + 4)//5 == 2", "B*B > 50",
                 "10//(B - 5) == 1", "min(B, 5) == 5", "B > 3 and B < 9", "B/2 == 3", "-B + 5 > 0", "B - 5", "5 == 5"):  # fmt: skip
        for answer in (True, False):

            def holds(batch: int, text: str = text, answer: bool = answer) -> bool:
                try:
                    return bool(Expr(text).evaluate({"B": batch})) == answer
                except ZeroDivisionError:
                    return False

            found = where(Expr(text), "B", answer, Batches.of(sizes))
            assert found == Batches.of([b for b in sizes if holds(b)]), (text, answer)


def test_sets_of_batches_are_joined_and_taken_apart_as_sets() -> None:
    for left, right in [({1, 2, 3, 7}, {2, 8}), (set(), {1}), ({4, 5, 9}, {1, 4, 5, 6, 9}), ({1, 2}, {3, 4})]:
        a, b = Batches.of(left), Batches.of(right)
        assert (a | b, a & b, a - b) == tuple(Batches.of(s) for s in (left | right, left & right, left - right))


def test_the_time_to_prepare_does_not_grow_with_the_range_of_batches() -> None:
    seconds = {}
    for upto in (64, 64, 10**6):
        start = time.perf_counter()
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).eval()
        runtime = prepare_split(model, (numbers(2, 3, 8, 8),), split=SplitSpec("50%", dynamic_batch=(1, upto)))
        seconds[upto] = time.perf_counter() - start
    assert runtime.plan.batches == Batches(((1, 10**6),))
    assert seconds[10**6] < seconds[64] + 1


# Writes between the prefix and the suffix


def skips(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = m.a(x)
    return m.b(y.relu()) + x.t().t(), y


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
            BoundaryError, match=r"^'x' crosses .* \(cut:\d\) .* written into .* hand a copy to the prefix"
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


@pytest.mark.parametrize("part", [nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4)])
def test_gradients_taken_inside_forward_through_ops_that_keep_tensors_to_themselves_are_refused(
    part: nn.Module,
) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            y = m.a(x.detach() * (1 if x.sum().item() else 2)).detach().requires_grad_()
            (found,) = torch.autograd.grad(m.b(y).pow(3).sum(), y)
        return found + m.b(x)

    with pytest.raises(UnsupportedError, match=r"takes gradients in the model itself .* write the derivative out"):
        prepare_split(Fn(forward, a=nn.Linear(4, 4), b=part), (numbers(2, 4),), split="50%")


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
    assert difference(model(x, captured).detach(), runtime.run_suffix(runtime.run_prefix(x, captured))) is None
    with pytest.raises(InputError, match="at capture, now it is"):
        runtime.run_prefix(x, other)


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
    runtime = prepare_split(model, (x,), split="50%", mode=mode)
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


# How inputs lie in memory


LAYOUTS = {
    "gapped": lambda b: numbers(b, 8)[:, ::2],
    "transposed": lambda b: numbers(4, b).t(),
    "gapped rows": lambda b: numbers(2 * b, 4)[::2],
    "contiguous": lambda b: numbers(b, 4),
    "expanded": lambda b: numbers(4).expand(b, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_examples_of_other_batches_lie_in_memory_as_a_callers_input_would(name: str) -> None:
    example = Example.of((LAYOUTS[name](3),), {})
    for batch in (2, 3, 5):
        (found,) = example.resized(batch)
        if name != "expanded" or batch == 3:
            assert (found.stride(), found.shape) == (LAYOUTS[name](batch).stride(), (batch, 4))
        assert torch.equal(found, LAYOUTS[name](3)[torch.arange(batch) % 3])
    if name == "transposed":  # its own memory: no element stands for two
        assert found.add_(1).unique().numel() == LAYOUTS[name](3).unique().numel()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_forward_that_asks_how_its_input_lies_in_memory_serves_every_layout(name: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.b(m.a(x) * 2 if x.is_contiguous() else m.a(x) - 1)

    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    runtime = prepare_split(model, (LAYOUTS[name](2),), split="50%")
    for batch in (2, 3, 1):
        x = LAYOUTS[name](batch)
        assert difference(model(x).detach(), runtime.run_suffix(runtime.run_prefix(x))) is None


# Inputs that share a size with the batch by accident


def with_table(m: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(x) + table.sum(0))


def test_an_input_that_is_as_large_as_the_batch_by_accident_is_refused_elsewhere_with_the_way_out() -> None:
    model = Fn(with_table, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    table = numbers(3, 4)
    runtime = prepare_split(model, (numbers(3, 4), table), split="50%")
    assert (
        difference(model(numbers(3, 4), table).detach(), runtime.run_suffix(runtime.run_prefix(numbers(3, 4), table)))
        is None
    )
    for batch in (1, 2, 5):
        with pytest.raises(
            BatchError, match=r"input \[1\] has 3\. .* by accident, prepare again with an example of another batch"
        ):
            runtime.run_prefix(numbers(batch, 4), table)
    runtime = prepare_split(model, (numbers(2, 4), table), split="50%")
    for batch in (1, 2, 3, 5):
        x = numbers(batch, 4)
        assert difference(model(x, table).detach(), runtime.run_suffix(runtime.run_prefix(x, table))) is None


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
