"""Each rule of the oracle fires where it should, and nowhere else."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from conformance.suite.compare import difference, form_difference, frozen, model_difference, sharing, tensors
from conformance.suite.oracle import beyond, deterministic, hold_informative, in_double, live_gradients
from conformance.suite.state import Snapshot, rng_moved, rng_state, seed_all
from conformance.suite.statuses import Status, Stop
from conformance.unit.trap_kit import numbers

EXACT = numbers(40, 25, seed=1).double()
NOISE = numbers(40, 25, seed=2).double() * 1e-6


def rounded(times: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A result whose error against EXACT is NOISE, so many times."""
    scale = 1000.0 if dtype != torch.float32 else 1.0  # half types must be able to show the error
    return (EXACT + times * scale * NOISE).to(dtype)


def judged(reference: Any, eager: Any, result: Any) -> str | None:
    found, _ = beyond(reference, eager, result)
    return None if found is None else f"{found.status}: {found}"


# --- the float64 rule -------------------------------------------------------------------------------------------------


def test_twice_eagers_error_by_rms_is_allowed_and_no_more() -> None:
    assert judged(EXACT, rounded(1), rounded(-1.8)) is None
    wrong = judged(EXACT, rounded(1), rounded(-2.3))
    assert wrong is not None
    assert "by rms" in wrong
    assert wrong.startswith("fail_accuracy")


def test_half_types_may_have_three_times() -> None:
    reference = torch.full((1000,), 1.0, dtype=torch.float64)
    eager = (reference + 0.01).to(torch.bfloat16)
    own = eager.double()[0] - 1
    assert judged(reference, eager, (reference + 2.5 * own).to(torch.bfloat16)) is None
    assert "3 times is allowed" in str(judged(reference, eager, (reference + 4 * own).to(torch.bfloat16)))
    single = (reference + own).float()
    assert "2 times is allowed" in str(judged(reference, single, (reference + 2.5 * own).float()))


def test_one_element_may_be_off_by_eight_times_eagers_maximum_and_no_more() -> None:
    reference = torch.ones(10_000, dtype=torch.float64)
    eager = torch.full((10_000,), 1 + 1e-3)
    for times, wanted in ((7.9, None), (8.2, "by maximum")):
        result = eager.clone()
        result[17] = 1 + 1e-3 * times
        found = judged(reference, eager, result)
        assert (found is None) if wanted is None else (wanted in str(found))


def test_there_is_no_floor() -> None:
    tiny = EXACT * 1e-30
    assert judged(tiny, (tiny * (1 + 1e-7)), (tiny * (1 + 5e-7))) is not None


def test_where_eager_is_exact_the_result_must_be() -> None:
    exact = torch.arange(12.0)
    assert judged(exact.double(), exact, exact.clone()) is None
    result = exact.clone()
    result[3] = torch.nextafter(result[3], torch.tensor(99.0))
    assert "where eager is exact" in str(judged(exact.double(), exact, result))


def test_a_nan_in_the_result_is_beyond_any_bound() -> None:
    result = rounded(1)
    result[0, 0] = float("nan")
    assert "fail_accuracy" in str(judged(EXACT, rounded(1), result))


def test_the_same_infinity_and_the_same_nan_are_no_error() -> None:
    reference, eager = EXACT.clone(), rounded(1)
    for t in (reference, eager):
        t[0, 0], t[0, 1] = float("inf"), float("nan")
    assert judged(reference, eager, eager.clone()) is None


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t[:-1], lambda t: {"more": t, "": t}])
def test_structure_is_compared_before_numbers(change: Any) -> None:
    eager = rounded(1)
    assert "fail_structure" in str(judged(EXACT, eager, change(eager)))


def test_all_leaves_are_looked_at_and_the_worst_is_named() -> None:
    wide = dict.fromkeys(("first", "second", "third", "fourth"), EXACT)
    eager = {name: rounded(1) for name in wide}
    found = judged(
        wide, eager, {"first": rounded(-2.3), "second": rounded(-9), "third": rounded(1), "fourth": rounded(-3)}
    )
    assert str(found).startswith("fail_accuracy: ['second']: ")
    assert str(found).endswith("(3 of 4 tensors are beyond)")
    exact = {"first": rounded(-9), "second": torch.arange(3.0)}
    reference = {"first": EXACT, "second": torch.arange(3.0).double()}
    off = {"first": rounded(-9), "second": torch.tensor([0.0, 1.0, 2.5])}
    assert "['second']: " in str(judged(reference, {**exact, "first": rounded(1)}, off)), (
        "what is exact outweighs any ratio"
    )


def test_where_eager_overflows_there_is_no_reference() -> None:
    wide = {"small": torch.tensor([1.0, 1e5], dtype=torch.float64), "large": torch.tensor([1e9], dtype=torch.float64)}
    eager = {"small": wide["small"].half(), "large": wide["large"].float()}
    with pytest.raises(Stop, match="no_reference: eager's own error against float64 is inf"):
        beyond(wide, eager, {"small": torch.tensor([5.0, 1.0]).half(), "large": eager["large"]})


def test_a_reference_as_far_from_eager_as_eager_is_large_is_none() -> None:
    with pytest.raises(Stop, match=r"no_reference: eager's own error against float64 is 1\.4 of the outputs' size"):
        beyond(EXACT, rounded(1).flip(0), rounded(1))


# --- discrete outputs -------------------------------------------------------------------------------------------------


def test_an_arg_max_may_differ_only_where_the_margin_is_under_the_bound() -> None:
    reference = torch.tensor([[1.0, 1.0 + 1e-7], [0.0, 5.0]], dtype=torch.float64)
    eager = {"logits": (reference + 1e-6).float(), "top": reference.argmax(1)}
    wide = {"logits": reference, "top": reference.argmax(1)}
    close = {"logits": eager["logits"], "top": torch.tensor([0, 1])}
    clear = {"logits": eager["logits"], "top": torch.tensor([1, 0])}
    assert judged(wide, eager, close) is None
    assert "leaves no doubt" in str(judged(wide, eager, clear))


def test_a_threshold_may_differ_only_where_the_margin_is_under_the_bound() -> None:
    reference = torch.tensor([1e-8, 3.0, -2.0, 0.7], dtype=torch.float64)
    eager = {"score": (reference + 1e-6).float(), "mask": reference > 0}
    wide = {"score": reference, "mask": reference > 0}
    assert judged(wide, eager, {**eager, "mask": torch.tensor([False, True, False, True])}) is None
    assert "leaves no doubt" in str(judged(wide, eager, {**eager, "mask": torch.tensor([True, True, True, True])}))


def test_discrete_outputs_that_nothing_explains_must_be_equal() -> None:
    wide = {"ids": torch.tensor([3, 1, 2]), "x": EXACT}
    eager = {"ids": torch.tensor([3, 1, 2]), "x": rounded(1)}
    assert judged(wide, eager, {**eager}) is None
    assert "no output explains them" in str(judged(wide, eager, {**eager, "ids": torch.tensor([3, 2, 1])}))


# --- the whole model --------------------------------------------------------------------------------------------------


def test_a_run_that_differs_from_itself_is_nondeterministic() -> None:
    count = itertools.count()
    with pytest.raises(Stop, match="nondeterministic: the model twice"):
        deterministic(lambda: torch.tensor(float(next(count))), "the model")
    assert torch.equal(deterministic(lambda: torch.ones(2), "the model"), torch.ones(2))


@pytest.mark.parametrize(
    ("output", "other", "reason"),
    [
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "not finite"),
        (torch.tensor([1.0, float("inf")]), torch.ones(2), "not finite"),
        (torch.full((4,), 2.0), torch.full((4,), 3.0), "constant over its elements"),
        (torch.arange(4.0), torch.arange(4.0), "the output does not depend on the input"),
        ([torch.arange(3.0), torch.ones(3)], [torch.arange(1.0, 4), torch.ones(3)], "1.* is constant over"),
        ([torch.arange(3.0), torch.arange(3.0)], [torch.arange(1.0, 4), torch.arange(3.0)], "1.* does not depend"),
        (nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.arange(3.0)), "no output depends"),
        (torch.arange(4), torch.arange(4), "no floating tensor"),
        ({}, {}, "no floating tensor"),
    ],
)
def test_outputs_that_would_hide_a_difference_are_degenerate(output: Any, other: Any, reason: str) -> None:
    with pytest.raises(Stop, match=f"degenerate: .*{reason}"):
        hold_informative(output, other)


def test_a_parameter_that_is_handed_out_is_no_output_that_ignores_the_input() -> None:
    bias = nn.Parameter(torch.arange(3.0))
    hold_informative([torch.arange(3.0), bias], [torch.arange(1.0, 4), bias])


@pytest.mark.parametrize(
    ("gradients", "reason"),
    [
        ({"a": None}, "no parameter gets a gradient"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.ones(1)}, "only 1 of 3"),
        ({"a": torch.tensor([1.0, float("nan")])}, "not finite"),
    ],
)
def test_dead_gradients_are_degenerate(gradients: Any, reason: str) -> None:
    with pytest.raises(Stop, match=f"degenerate: .*{reason}"):
        live_gradients(gradients)


def test_live_gradients_may_have_a_dead_one_and_a_missing_one_among_them() -> None:
    live_gradients({"a": torch.ones(1), "b": torch.zeros(2), "c": None})


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dtype, self.table = nn.Linear(4, 4), torch.float32, [torch.ones(4) / 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table[0] + torch.full((4,), 1 / 3) + torch.ones((), dtype=self.dtype) / 3


def test_the_reference_runs_in_float64_throughout_and_leaves_the_model_alone() -> None:
    model, x = Wide(), numbers(2, 4)
    state = rng_state()
    reference = in_double(model, lambda wide, given: wide(given), x, 0)
    by_hand = (
        nn.functional.linear(x.double(), model.linear.weight.double(), model.linear.bias.double())
        * (torch.ones(4) / 3).double()
        + 1 / 3
        + 1 / 3
    )
    assert reference.dtype == torch.float64
    assert torch.equal(reference, by_hand)
    assert model.linear.weight.dtype == model.table[0].dtype == model(x).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert rng_moved(state, rng_state()) is None


def test_in_float64_gradients_reach_parameters_that_a_module_keeps_in_a_list_too() -> None:
    def call(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        model(x)[0].sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    found = in_double(nn.LSTM(3, 4), call, numbers(2, 2, 3), 0)
    assert all(g is not None and g.dtype is torch.float64 for g in found.values())


def test_a_model_that_does_not_run_in_float64_has_no_reference() -> None:
    def call(model: nn.Module, inputs: Any) -> Any:
        raise RuntimeError("expected Float but found Double")

    with pytest.raises(Stop, match="no_reference: the model does not run in float64: RuntimeError: expected Float"):
        in_double(nn.Linear(2, 2), call, torch.ones(2), 0)


# --- the comparator ---------------------------------------------------------------------------------------------------


class Cache:
    def __init__(self, t: torch.Tensor) -> None:
        self.layers = [{"keys": t}]


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


BASE = numbers(3, 4)
ODD = BASE.clone()
ODD[1, 2] = torch.nextafter(ODD[1, 2], torch.tensor(9.0))
STRUCTURE, ACCURACY = Status.FAIL_STRUCTURE, Status.FAIL_ACCURACY


@pytest.mark.parametrize(
    ("a", "b", "status", "where"),
    [
        (BASE, ODD, ACCURACY, ""),
        (torch.tensor(0.0), torch.tensor(-0.0), ACCURACY, ""),
        (BASE, BASE.double(), STRUCTURE, ""),
        (BASE, BASE[:2], STRUCTURE, ""),
        (BASE, BASE.t().contiguous().t(), STRUCTURE, ""),
        (BASE, BASE.clone().requires_grad_(), STRUCTURE, ""),
        (BASE, nn.Parameter(BASE, requires_grad=False), STRUCTURE, ""),
        ([BASE], (BASE,), STRUCTURE, ""),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, STRUCTURE, ""),
        ({"a": [1, 2.0]}, {"a": [1, 2]}, STRUCTURE, "['a'][1]"),
        ({"a": None}, {"a": BASE}, STRUCTURE, "['a']"),
        ([1, 2], [1, 3], ACCURACY, "[1]"),
        ([1], [1, 1], STRUCTURE, ""),
        (Cache(BASE), Cache(ODD), ACCURACY, ".layers[0]['keys']"),
        (partial(torch.mul, BASE), partial(torch.mul, ODD), ACCURACY, ".args[0]"),
        (partial(torch.mul, BASE), partial(torch.add, BASE), ACCURACY, ".func"),
        (Slotted(BASE), Slotted(ODD), ACCURACY, ".held"),
        (torch.ones(2, dtype=torch.complex64), torch.full((2,), 1 + 1e-7j), ACCURACY, ""),
        (torch.tensor([True, False]), torch.tensor([True, True]), ACCURACY, ""),
        (torch.ones(2, dtype=torch.bfloat16), torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16), ACCURACY, ""),
    ],
)
def test_the_comparator_notices(a: Any, b: Any, status: Status, where: str) -> None:
    found = difference(a, b)
    assert found is not None
    assert (found.status, found.where) == (status, where)
    assert difference(a, frozen(a)) is None
    assert difference(b, frozen(b)) is None


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        ([BASE, 3], [ODD, 3], False),
        ([BASE, 3], [ODD, 4], True),
        ([BASE, [BASE]], [ODD, (BASE,)], True),
        ({"a": BASE, "b": BASE}, {"b": BASE, "a": ODD}, True),
        ([BASE, BASE], [ODD, BASE.clone().requires_grad_()], True),
        (BASE, BASE.t().contiguous().t(), False),
    ],
)
def test_the_form_is_compared_to_the_end_whatever_numbers_differ(a: Any, b: Any, differs: bool) -> None:
    assert (form_difference(a, b) is not None) == differs


def test_the_comparator_tells_a_missing_gradient_from_a_zero_one() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    b.grad = torch.zeros(2)
    assert difference(a, b) is None
    assert str(difference({"w": a}, {"w": b}, gradients=True)) == "['w'].grad: None against a tensor"


class Average:
    """A callable that keeps something."""

    def __init__(self) -> None:
        self.mean, self.calls = torch.zeros(2), 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.mean.add_(1)


def test_what_a_callable_object_keeps_is_compared_and_put_back() -> None:
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        m.average, m.act = Average(), torch.relu
    snapshot = Snapshot(model)
    assert model_difference(twin, model) is None
    model.average()
    assert str(model_difference(twin, model)).startswith("average.mean: values differ in 2 of 2 elements")
    model.average.mean.zero_()
    assert str(model_difference(twin, model)) == "average.calls: 0 against 1"
    snapshot.restore()
    assert model_difference(twin, model) is None
    model.act = torch.tanh
    assert model_difference(twin, model) is not None


def test_values_that_hold_themselves_are_compared_to_an_end() -> None:
    loops: list[list[Any]] = [[1], [1]]
    for loop in loops:
        loop.append(loop)
    assert difference(*loops) is None


def test_tensors_that_share_memory_are_named_in_groups() -> None:
    base = torch.zeros(4)
    assert sharing([("a", base), ("b", torch.ones(1)), ("c", base[1:])]) == [("a", "c")]


def test_a_container_that_is_there_twice_counts_at_both_places_where_every_path_does() -> None:
    kept = [torch.zeros(2)]
    apart = [[kept[0]], [kept[0]]]
    assert [name for name, _ in tensors([kept, kept])] == ["[0][0]"]
    once, twice = (sharing(tensors(value, every_path=True)) for value in ([kept, kept], apart))
    assert once == twice == [("[0][0]", "[1][0]")]
    loop: list[Any] = [kept[0]]
    loop.append(loop)
    assert [name for name, _ in tensors(loop, every_path=True)] == ["[0]"]


CHANGES = {
    "weight": lambda m: m[0].weight.data[0, 0].add_(1),
    "gradient": lambda m: setattr(m[0].bias, "grad", torch.zeros_like(m[0].bias)),
    "buffer": lambda m: m[1].running_mean.add_(1),
    "flag": lambda m: m[0].weight.requires_grad_(False),
    "mode": lambda m: m[1].eval(),
    "attribute": lambda m: setattr(m, "kept", {"list": [torch.ones(2)]}),
    "number": lambda m: setattr(m[1], "momentum", 0.25),
    "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "module": lambda m: m.append(nn.ReLU()),
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(2, 2))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_two_models_are_compared_to_any_depth_and_a_snapshot_puts_all_of_it_back(change: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert model_difference(twin, model) is None
    snapshot, objects = Snapshot(model), [id(p) for p in model.parameters()]
    change(model)
    assert model_difference(twin, model) is not None
    snapshot.restore()
    assert model_difference(twin, model) is None
    assert [id(p) for p in model.parameters()] == objects


def test_each_generator_is_watched() -> None:
    for name, draw in (("torch", lambda: torch.rand(1)), ("python", random.random), ("numpy", numpy.random.rand)):
        seed_all(3)
        before = rng_state()
        draw()
        assert rng_moved(before, rng_state()) == f"the generator of {name} stands elsewhere than after the whole model"
        seed_all(3)
        assert rng_moved(before, rng_state()) is None
