"""Traps 8 to 10: autocast and layouts, batch sizes, structures of inputs and outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from ariadne.errors import BatchError, FrontierError, GuardError
from conformance.unit.trap_kit import Fn, Twins, numbers, same

X = numbers(2, 6)
IMAGE = numbers(2, 3, 6, 6)
BATCHES = (1, 2, 3, 5, 8)


def two(function: Callable[..., Any], **more: Any) -> Callable[[], nn.Module]:
    """A model with two linear layers `a` and `b`, 6 to 6 each, and whatever `more` names."""
    return lambda: Fn(function, a=nn.Linear(6, 6), b=nn.Linear(6, 6), **{k: v() for k, v in more.items()})


def at_all_batches(twins: Twins, *dims: int) -> None:
    """Replay and train at several sizes, the smallest and the largest of the range among them."""
    for batch in BATCHES:
        twins.replay(numbers(batch, *dims), wire=batch == 3)
    for batch in (1, 3):
        twins.train(numbers(batch, *dims), steps=2)


def either(act: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...] = GuardError) -> None:
    """What `act` compares is equal, or a guard refuses the call."""
    try:
        act()
    except error:
        return


# 8: autocast and layouts


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def mixed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Linear(8, 3),
        nn.Softmax(-1),
    )


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_at_replay_equals_autocast_on_the_model(outside: bool) -> None:
    twins = Twins(mixed, IMAGE)
    twins.replay(numbers(3, 3, 6, 6), mode=bf16)
    twins.train(numbers(3, 3, 6, 6), mode=bf16, backward_outside=outside, steps=2)
    twins.replay(numbers(3, 3, 6, 6))


@pytest.mark.parametrize("captured", ["outside", "inside"])
def test_autocast_that_forward_switches_off_is_off_at_replay(captured: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x))
        with torch.autocast("cpu", enabled=False):
            return self.c(h.float())

    with bf16() if captured == "inside" else nullcontext():
        twins = Twins(two(forward, c=lambda: nn.Linear(6, 6)), X)
    twins.replay(numbers(3, 6), mode=bf16)
    twins.replay(numbers(3, 6))


class Square(torch.autograd.Function):
    """A backward of its own, with a product that autocast would cast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x.float() @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (g.float() @ w.t()).to(x.dtype), x.float().t() @ g.float()


def test_a_backward_of_its_own_runs_outside_autocast_if_the_model_s_does() -> None:
    Twins(two(lambda s, x: Square.apply(s.b(s.a(x)), s.a.weight)), X).train(
        numbers(5, 6), mode=bf16, backward_outside=True, steps=1
    )


def test_a_layer_called_on_both_sides_under_autocast_has_the_gradient_of_the_whole() -> None:
    """The whole adds the gradients of one cached bf16 copy, and of one for each call without that cache."""
    for mode in (bf16, lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)):
        twins = Twins(lambda: Fn(lambda s, x: s.a(torch.tanh(s.a(torch.relu(s.a(x))))), a=nn.Linear(6, 6)), X)
        twins.train(numbers(7, 6), mode=mode, steps=2)


def test_python_that_looks_at_a_dtype_under_autocast_is_captured_again() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h * 2 if h.dtype is torch.bfloat16 else h)

    twins = Twins(two(forward), X)
    twins.replay(numbers(3, 6), mode=bf16, runtime=twins.runtime)
    twins.replay(numbers(3, 6), runtime=twins.runtime)
    twins.train(numbers(3, 6), mode=bf16, runtime=twins.runtime)


def channels_last(*shape: int) -> torch.Tensor:
    return numbers(*shape).contiguous(memory_format=torch.channels_last)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
    )


@pytest.mark.parametrize("example", ["contiguous", "channels_last"])
@pytest.mark.parametrize("wire", [False, True])
def test_channels_last_in_gives_the_strides_of_the_whole(example: str, wire: bool) -> None:
    twins = Twins(convolutions, IMAGE if example == "contiguous" else channels_last(2, 3, 6, 6))
    for make in (channels_last, numbers):
        found = twins.replay(make(3, 3, 6, 6), wire=wire)
        assert found.is_contiguous(memory_format=torch.channels_last) == (make is channels_last)
        twins.train(make(3, 3, 6, 6), wire=wire, steps=2)
    for model in (twins.whole, twins.split):
        model.to(memory_format=torch.channels_last)
    twins.replay(numbers(3, 3, 6, 6), wire=wire)
    twins.train(numbers(3, 3, 6, 6), wire=wire, steps=2)


@pytest.mark.parametrize("step", ["contiguous", "view if it can", "empty_like", "reshape"])
def test_forward_that_depends_on_the_layout_follows_the_input_s(step: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x)
        if step == "contiguous":
            return self.norm(h.contiguous())
        if step == "view if it can":
            return self.norm(h).view(h.shape[0], -1) if h.is_contiguous() else self.norm(h)
        if step == "empty_like":
            return self.norm(h) + torch.zeros_like(h)
        return self.norm(h).reshape(h.shape[0], -1)

    twins = Twins(lambda: Fn(forward, conv=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4)), IMAGE)
    for runtime in twins.cuts():
        if step == "view if it can" and runtime.split_id == "cut:3":  # forward ends there with the other layout
            with pytest.raises(FrontierError, match="each side keeps its parameters"):
                runtime.run_training_prefix(channels_last(3, 3, 6, 6))
            continue
        twins.replay(channels_last(3, 3, 6, 6), runtime=runtime)
        twins.train(channels_last(3, 3, 6, 6), runtime=runtime, steps=2)


def test_transposed_inputs_give_the_strides_of_the_whole() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.ReLU()), numbers(2, 4, 6))
    for make in (lambda: numbers(4, 3, 6).transpose(0, 1), lambda: numbers(6, 3, 4).permute(1, 2, 0)):
        for runtime in twins.cuts():
            with torch.no_grad():
                same(twins.whole(make()), runtime.run_suffix(runtime.run_prefix(make())))


# 9: batch sizes


def heads(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Four heads, four tokens, a table of four rows: at batch 4 all of them look like the batch."""
    n, t, _ = x.shape
    q = self.a(x).view(n, t, 4, 2).transpose(1, 2)
    scores = (q @ q.transpose(-1, -2)) / 4 + self.table
    out = (scores.softmax(-1) @ q).transpose(1, 2).reshape(n, t, 8)
    return self.b(out) * 4 + torch.arange(4.0)[:, None]


def four() -> nn.Module:
    return Fn(heads, a=nn.Linear(8, 8), b=nn.Linear(8, 4), table=nn.Parameter(torch.zeros(4, 4)))


def observed_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, with a number read out of a buffer, so that fake tensors can't follow it."""

    def forward(self: Any, *args: Any) -> Any:
        return function(self, *args) * float(self.one)

    return forward


@pytest.mark.parametrize("example", [1, 2, 4])
@pytest.mark.parametrize("observed", [False, True])
def test_a_constant_that_equals_the_batch_stays_a_constant(example: int, observed: bool) -> None:
    def build() -> nn.Module:
        model = four()
        if observed:
            model.function = observed_only(heads)
            model.register_buffer("one", torch.ones(()))
        return model

    twins = Twins(build, numbers(example, 4, 8))
    for batch in (1, 2, 3, 4, 5, 8):
        twins.replay(numbers(batch, 4, 8))
    twins.train(numbers(3, 4, 8), steps=2)


@pytest.mark.parametrize("example", [1, 3])
def test_batch_1_and_both_ends_of_the_range_equal_the_whole(example: int) -> None:
    twins = Twins(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)), numbers(example, 3, 6, 6)
    )
    at_all_batches(twins, 3, 6, 6)


def test_batch_1_that_squeezes_away_its_batch_is_captured_by_itself() -> None:
    twins = Twins(two(lambda s, x: s.b(s.a(x)[:, None].squeeze())), X)
    for batch in BATCHES:
        twins.replay(numbers(batch, 6), runtime=twins.runtime)
        twins.train(numbers(batch, 6), runtime=twins.runtime, steps=2)


@pytest.mark.parametrize("limits", [(2, 5), (1, 4), (3, 3)])
def test_one_past_each_end_of_the_range_is_refused(limits: tuple[int, int]) -> None:
    twins = Twins(two(lambda s, x: s.b(s.a(x))), X, batches=limits)
    low, high = limits
    for batch in {low, high}:
        twins.replay(numbers(batch, 6))
        twins.train(numbers(batch, 6), steps=1)
    for batch in (low - 1, high + 1):
        for run in (twins.runtime.run_prefix, twins.runtime.run_training_prefix):
            with pytest.raises(BatchError, match=rf"batch {batch} lies outside dynamic_batch \({low}, {high}\)"):
                run(numbers(batch, 6))


def test_sizes_that_are_no_multiple_of_the_batch_are_followed() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        h = self.a(x)
        return self.b(h[: (n + 1) // 2]).sum() / (n * n) + h[n // 2 :].mean() * n

    at_all_batches(Twins(two(forward), X), 6)


def test_batches_whose_inputs_disagree_are_refused() -> None:
    runtime = Twins(two(lambda s, x, y: s.b(s.a(x) + y)), X, X).runtime
    with pytest.raises(BatchError, match="inputs must share one batch"):
        runtime.run_prefix(numbers(3, 6), numbers(1, 6))


# 10: structures


def test_keywords_are_taken_in_any_order() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Any, *, scale: Any, shift: Any = None) -> Any:
            return self.b(self.a(x) * scale + shift)

    twins = Twins(Named, X, scale=X, shift=X)
    twins.replay(numbers(3, 6), shift=numbers(3, 6, seed=1), scale=numbers(3, 6, seed=2))
    twins.train(numbers(3, 6), shift=numbers(3, 6, seed=1), scale=numbers(3, 6, seed=2))


def test_keywords_alone_with_none_and_scalars_among_them() -> None:
    def forward(
        self: Any, *, ids: torch.Tensor, mask: Any = None, flag: bool = False, scale: float = 1.0, kind: str = "a"
    ) -> Any:
        h = self.a(ids) * scale
        return self.b(h if mask is None else h * mask) if flag and kind == "b" else h

    twins = Twins(two(forward), ids=X, mask=None, flag=True, scale=0.5, kind="b")
    twins.train(ids=numbers(3, 6), mask=None, flag=True, scale=0.5, kind="b")
    given = {"ids": X, "mask": None, "flag": True, "scale": 0.5, "kind": "b"}
    for change in ({"mask": X}, {"flag": False}, {"scale": 2.0}, {"kind": "a"}, {"flag": 1}):
        twins.train(**(given | change))


def test_keywords_that_are_missing_or_extra_are_refused_and_positional_ones_taken() -> None:
    twins = Twins(two(lambda s, x, y=None: s.b(s.a(x) + y)), X, y=X)
    runtime = twins.runtime
    twins.replay(X, X)
    twins.replay(x=X, y=X)
    for kwargs in ({}, {"y": X, "z": X}):  # this forward takes any, and what it calls refuses them
        with pytest.raises(TypeError):
            runtime.run_prefix(X, **kwargs)


def test_nested_inputs_with_tensors_that_carry_no_batch() -> None:
    def forward(self: Any, features: Any, extra: Any) -> torch.Tensor:
        x, (y, none) = features["x"], features["pair"]
        assert none is None
        return self.b(self.a(x) * extra[0] + y)

    def inputs(batch: int) -> tuple[Any, Any]:
        return {"x": numbers(batch, 6), "pair": (numbers(batch, 6, seed=1), None)}, [numbers(6, seed=2), 3]

    twins = Twins(two(forward), *inputs(2))
    for batch in (1, 3):
        twins.replay(*inputs(batch), wire=True)
        twins.train(*inputs(batch), steps=2)
    twins.replay({"x": X, "pair": [X, None]}, [numbers(6), 3])


@dataclass
class Result:
    out: torch.Tensor
    count: int
    nothing: None
    parts: list[Any]


OUTPUTS: dict[str, Callable[..., Any]] = {
    "dict": lambda x, h: {"z": h, "a": h * 2, 3: (h.sum(), [])},
    "dataclass": lambda x, h: Result(h, x.shape[0], None, [h + 1, {"deep": (h - 1,)}]),
    "ModelOutput": lambda x, h: BaseModelOutput(last_hidden_state=h, hidden_states=(x, h)),
    "scalars": lambda x, h: (h, None, True, 2.5, "name", x.shape[0], x.shape[0] * 2 + 1),
    "shape": lambda x, h: {"out": h, "shape": x.shape},
    "inputs": lambda x, h: (x, h, x),
    "same twice": lambda x, h: [h, h],
    "a view with gaps": lambda x, h: (h[:, ::2], h.t()),
    "a named result": lambda x, h: h.max(-1),
    "ordered": lambda x, h: OrderedDict(z=h, a=x),
    "nothing made": lambda x, h: (h.mean(), ()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_come_back_in_their_structure(name: str) -> None:
    twins = Twins(two(lambda s, x: OUTPUTS[name](x, s.b(torch.tanh(s.a(x))))), X)
    for batch in (1, 3, 8):
        twins.replay(numbers(batch, 6), wire=batch == 3)
    twins.train(numbers(3, 6), steps=2)


def test_outputs_that_are_one_object_are_one_object_again() -> None:
    runtime = Twins(two(lambda s, x: (lambda h: (h, h))(s.b(s.a(x)))), X).runtime
    first, second = runtime.run_suffix(runtime.run_prefix(X))
    assert first is second


def test_a_model_output_drops_what_is_none_as_the_model_does() -> None:
    runtime = Twins(two(lambda s, x: BaseModelOutput(last_hidden_state=s.b(s.a(x)))), X).runtime
    found = runtime.run_suffix(runtime.run_prefix(X))
    assert type(found) is BaseModelOutput
    assert list(found) == ["last_hidden_state"]
    assert found.hidden_states is None
