"""Traps 8 to 14: autocast and layouts, batch sizes, structures, groups of outputs, tensors made in forward, names, branches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from ariadne import SplitSpec, prepare_split
from ariadne.errors import BatchError, FrontierError, GuardError, InputError, ModuleError, WitnessError
from conformance.trap_kit import Fn, Twins, loss_of, numbers, same

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


def either(act: Callable[[], Any], error: type[Exception] = GuardError) -> None:
    """What `act` compares is equal, or a guard refuses the call."""
    try:
        act()
    except error:
        return


# 8: autocast and layouts


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def mixed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8),
                         nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1))  # fmt: skip


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_at_replay_equals_autocast_on_the_model(outside: bool) -> None:
    twins = Twins(mixed, IMAGE)
    twins.replay(numbers(3, 3, 6, 6), mode=bf16)
    twins.train(numbers(3, 3, 6, 6), mode=bf16, backward_outside=outside, steps=2)
    twins.replay(numbers(3, 3, 6, 6))


def test_a_backward_pass_outside_autocast_is_not_cast() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x))
        with torch.autocast("cpu", enabled=False):
            return self.c(h.float())

    Twins(two(forward, c=lambda: nn.Linear(6, 6)), X).train(numbers(5, 6), mode=bf16, backward_outside=True, steps=2)


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
    twins = Twins(lambda: Fn(lambda s, x: s.a(torch.tanh(s.a(torch.relu(s.a(x))))), a=nn.Linear(6, 6)), X)
    twins.train(numbers(7, 6), mode=bf16, steps=2)


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
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))


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
    twins = Twins(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)), numbers(example, 3, 6, 6))
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
    twins = Twins(two(lambda s, x, *, scale, shift=None: s.b(s.a(x) * scale + shift)), X, scale=X, shift=X)
    twins.replay(numbers(3, 6), shift=numbers(3, 6, seed=1), scale=numbers(3, 6, seed=2))
    twins.train(numbers(3, 6), shift=numbers(3, 6, seed=1), scale=numbers(3, 6, seed=2))


def test_keywords_alone_with_none_and_scalars_among_them() -> None:
    def forward(self: Any, *, ids: torch.Tensor, mask: Any = None, flag: bool = False, scale: float = 1.0, mode: str = "a") -> Any:
        h = self.a(ids) * scale
        return self.b(h if mask is None else h * mask) if flag and mode == "b" else h

    twins = Twins(two(forward), ids=X, mask=None, flag=True, scale=0.5, mode="b")
    twins.train(ids=numbers(3, 6), mask=None, flag=True, scale=0.5, mode="b")
    for change in ({"mask": X}, {"flag": False}, {"scale": 2.0}, {"mode": "a"}, {"flag": 1}):
        with pytest.raises(InputError, match=r"was .* at capture|tensor|structure"):
            twins.runtime.run_prefix(**({"ids": X, "mask": None, "flag": True, "scale": 0.5, "mode": "b"} | change))


def test_keywords_that_are_missing_extra_or_positional_are_refused() -> None:
    runtime = Twins(two(lambda s, x, y=None: s.b(s.a(x) + y)), X, y=X).runtime
    for args, kwargs in (((X,), {}), ((X, X), {}), ((X,), {"y": X, "z": X}), ((), {"x": X, "y": X})):
        with pytest.raises(InputError, match="structure"):
            runtime.run_prefix(*args, **kwargs)


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
    with pytest.raises(InputError, match="structure"):
        twins.runtime.run_prefix({"x": X, "pair": [X, None]}, [numbers(6), 3])


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
    "same twice": lambda x, h: [h, h, h[:, :2]],
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


# 11: groups of outputs and sequences


def lstm(self: Any, x: torch.Tensor) -> torch.Tensor:
    out, (h, c) = self.rnn(self.a(x))
    return self.b(out[:, -1] + h[-1] * c[0])


GROUPS: dict[str, Callable[..., Any]] = {
    "chunk": lambda s, x: (lambda p: s.b(torch.cat([p[2], p[0] * 2, p[1]], -1)))(s.a(x).chunk(3, -1)),
    "split": lambda s, x: (lambda p: s.b(torch.cat([p[1], p[0].tanh()], -1)))(s.a(x).split([2, 4], -1)),
    "unbind": lambda s, x: s.b(torch.stack(s.a(x).unbind(1)[::-1], 1)),
    "topk": lambda s, x: (lambda v, i: s.b(v * i).sum(-1, keepdim=True) + i)(*s.a(x).topk(6)),
    "sort": lambda s, x: (lambda r: s.b(r.values).gather(-1, r.indices))(s.a(x).sort(-1)),
    "max": lambda s, x: (lambda r: s.b(s.a(x) - r[0][..., None]) + r[1][..., None])(s.a(x).max(-1)),
    "unpacked late": lambda s, x: (lambda p, h: s.b(h) + torch.cat(p[::-1], -1))(s.a(x).chunk(2, -1), s.b(x).tanh()),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_outputs_is_never_torn_and_its_elements_keep_their_order(name: str) -> None:
    twins = Twins(two(GROUPS[name]), numbers(2, 4, 6))
    at_all_batches(twins, 4, 6)
    plan = twins.runtime.plan
    assert all(len(node.outputs) == 1 or node.unpack for node in plan.nodes)
    assert any(len(c.live) > 1 for c in twins.runtime.candidates)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_state_crosses_the_boundary(kind: type) -> None:
    function = lstm if kind is nn.LSTM else lambda s, x: (lambda out, h: s.b(out[:, -1] + h[-1]))(*s.rnn(s.a(x)))
    twins = Twins(two(function, rnn=lambda: kind(6, 6, num_layers=2, batch_first=True, dropout=0.3)), numbers(2, 4, 6))
    at_all_batches(twins, 4, 6)


def test_an_lstm_whose_parameters_were_replaced_is_followed() -> None:
    twins = Twins(two(lstm, rnn=lambda: nn.LSTM(6, 6, batch_first=True)), numbers(2, 4, 6))
    for model in (twins.whole, twins.split):
        model.rnn.weight_hh_l0 = nn.Parameter(numbers(24, 6))
    twins.train(numbers(3, 4, 6))


SEQUENCES: dict[str, Callable[..., Any]] = {
    "unbind": lambda s, x: s.b(torch.stack(s.a(x).unbind(0)[::-1])),
    "split": lambda s, x: s.b(torch.cat(s.a(x).split(2)[::-1])),
    "chunk": lambda s, x: s.b(torch.cat(s.a(x).chunk(2)[::-1])),
    "loop": lambda s, x: torch.stack([s.b(r) for r in s.a(x)]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_as_long_as_the_batch_crosses_the_boundary_with_its_elements_reordered(name: str) -> None:
    twins = Twins(two(SEQUENCES[name]), X, batches=(1, 5))
    for batch in (1, 2, 3, 5):
        for runtime in (twins.runtime, twins.runtime.resplit("after:a"), twins.runtime.resplit("80%")):
            twins.replay(numbers(batch, 6), runtime=runtime, wire=batch == 3)
            twins.train(numbers(batch, 6), runtime=runtime, steps=2)


# 12: tensors that forward makes, and those that are no parameters


MADE: dict[str, Callable[..., Any]] = {
    "arange": lambda s, x: s.b(s.a(x) + torch.arange(x.shape[0])[:, None]),
    "arange early": lambda s, x: (lambda r: s.b(s.a(x)) * r)(torch.arange(x.shape[0])[:, None]),
    "zeros": lambda s, x: (lambda h: s.b(h.copy_(s.a(x)) + 1))(torch.zeros(x.shape[0], 6)),
    "randn": lambda s, x: s.b(s.a(x) + torch.randn(x.shape[0], 6)),
    "new_ones": lambda s, x: s.b(s.a(x) * x.new_ones(x.shape)),
    "eye": lambda s, x: s.b(torch.eye(x.shape[0]) @ s.a(x)),
    "constant": lambda s, x: s.b(s.a(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]) + torch.tensor(2)),
    "constant written": lambda s, x: s.b(s.a(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]).mul_(2)),
    "full like": lambda s, x: s.b(torch.where(s.a(x) > 0, torch.full_like(x, 3), s.a(x))),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_made_in_forward_are_made_anew_for_every_batch(name: str) -> None:
    at_all_batches(Twins(two(MADE[name]), X), 6)


class Extras(nn.Module):
    """Tensors of every home: a buffer that is saved, one that is not, a plain attribute, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("saved", numbers(6, seed=1))
        self.register_buffer("unsaved", numbers(6, seed=2), persistent=False)
        self.plain = numbers(6, seed=3)
        self.several = [numbers(6, seed=4), {"in": numbers(6, seed=5)}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x * self.saved + self.unsaved)
        return self.b(h * self.plain) + self.several[0] * self.several[1]["in"]


def test_buffers_and_plain_attributes_are_read_where_they_are_now() -> None:
    twins = Twins(Extras, X)
    at_all_batches(twins, 6)
    for model in (twins.whole, twins.split):
        model.saved.mul_(2)
        model.unsaved = numbers(6, seed=6)
        model.plain = numbers(6, seed=7)
        model.several[1]["in"] = numbers(6, seed=8)
        model.several[0] = numbers(6, seed=9)
    at_all_batches(twins, 6)


def test_a_buffer_that_forward_writes_or_replaces_moves_as_in_the_whole() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.a(x) + self.calls
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.b(h - self.mean)

    def build() -> nn.Module:
        model = two(forward)()
        model.register_buffer("calls", torch.zeros(()))
        model.register_buffer("mean", torch.zeros(6), persistent=False)
        return model

    at_all_batches(Twins(build, X), 6)


def test_a_plain_attribute_that_forward_writes_in_place_moves_as_in_the_whole() -> None:
    def build() -> nn.Module:
        model = two(lambda s, x: s.b(s.a(x) + s.count.add_(1)))()
        model.count = torch.zeros(())
        return model

    twins = Twins(build, X)
    same(torch.zeros(()), twins.split.count)
    twins.train(numbers(3, 6))
    same(twins.whole.count, twins.split.count)


def test_a_plain_attribute_that_forward_replaces_is_followed_or_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.memory = self.a(x).detach().mean(0) + self.memory
        return self.b(x) + self.memory

    def build() -> nn.Module:
        model = two(forward)()
        model.memory = torch.zeros(6)
        return model

    def act() -> None:
        twins = Twins(build, X)
        for _ in range(3):
            twins.replay(numbers(3, 6))
        same(twins.whole.memory, twins.split.memory)

    either(act, Exception if False else (GuardError, RuntimeError))  # type: ignore[arg-type]


# 13: modules called more than once, names that say nothing


def twice() -> nn.Module:
    model = two(lambda s, x: s.b(s.a(torch.tanh(s.a(x)))))()
    model.never = nn.Linear(6, 6)
    return model


def test_a_module_called_twice_is_cut_after_the_call_that_was_named() -> None:
    twins = Twins(twice, X)
    cuts = [twins.runtime.resplit(f"after:a#{call}") for call in (1, 2)]
    assert cuts[0].candidate.cut < cuts[1].candidate.cut
    for runtime in cuts:
        twins.replay(numbers(3, 6), runtime=runtime)
        twins.train(numbers(3, 6), runtime=runtime)
    assert twins.split.never.weight.grad is None


@pytest.mark.parametrize(
    ("boundary", "words"),
    [
        ("after:a", r"forward calls it 2 times; say which, from 'after:a#1' to 'after:a#2'"),
        ("after:a#3", r"after call 3 of 'a': forward calls it 2 time\(s\)"),
        ("after:never", r"cannot split after 'never'"),
        ("after:encoder.layer", r"no module of that name\. Nearest: .*'encoder\.layer1'"),
        ("after:encoder.layer1.2", r"no module of that name\. Nearest: .*'encoder\.layer1\.1'"),
        ("after:zzz", r"no module of that name\. It calls .*'encoder'"),
        ("after:b", r"no op runs after that point, so one side would be empty"),
    ],
)
def test_a_name_that_says_nothing_is_refused_with_the_nearest(boundary: str, words: str) -> None:
    encoder = nn.ModuleDict({"layer1": nn.Sequential(nn.Linear(6, 6), nn.Tanh()), "layer2": nn.Linear(6, 6)})
    path = nn.Sequential()
    path.add_module("layer1", encoder["layer1"])
    path.add_module("layer2", encoder["layer2"])

    def build() -> nn.Module:
        model = two(lambda s, x: s.b(s.a(torch.tanh(s.a(s.encoder(x))))), encoder=lambda: path)()
        model.never = nn.Linear(6, 6)
        return model

    runtime = Twins(build, X).runtime
    with pytest.raises(FrontierError, match=words):
        runtime.resplit(boundary)
    with pytest.raises(FrontierError, match=words):
        prepare_split(runtime.model, (X,), split=SplitSpec(boundary))


def test_a_module_that_exists_but_never_runs_is_told_from_one_that_does_not_exist() -> None:
    runtime = Twins(twice, X).runtime
    with pytest.raises(FrontierError, match="never"):
        runtime.resplit("after:never")
    with pytest.raises(FrontierError) as never:
        runtime.resplit("after:never")
    with pytest.raises(FrontierError) as unknown:
        runtime.resplit("after:nowhere")
    assert str(never.value).replace("never", "_") != str(unknown.value).replace("nowhere", "_")


# 14: branches


def test_a_branch_on_data_holds_or_is_refused() -> None:
    twins = Twins(two(lambda s, x: s.b(s.a(x) if x.sum() > 0 else -s.a(x))), X.abs())
    for runtime in twins.cuts():
        twins.replay(numbers(3, 6).abs(), runtime=runtime)
        with pytest.raises(WitnessError, match="reads a value out of a tensor"):
            runtime.run_suffix(runtime.run_prefix(-X.abs()))


def test_a_branch_on_data_of_the_suffix_is_refused_before_anything_moves() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x))
        return self.b(h if x.mean() > 0 else h * 2)

    twins = Twins(two(forward, norm=lambda: nn.BatchNorm1d(6)), X.abs())
    for runtime in twins.cuts():
        before = {n: t.clone() for n, t in twins.split.named_buffers()}
        with pytest.raises(WitnessError):
            runtime.run_suffix(runtime.run_prefix(-X.abs()))
        same(before, dict(twins.split.named_buffers()), f"{runtime.split_id}: buffers moved")


@pytest.mark.parametrize("example", [2, 6])
def test_a_branch_on_the_batch_is_captured_on_both_sides(example: int) -> None:
    twins = Twins(two(lambda s, x: s.b(s.a(x)) if x.shape[0] > 4 else s.b(s.a(x).tanh())), numbers(example, 6))
    for batch in (4, 5, 1, 8, 4):
        twins.replay(numbers(batch, 6), runtime=twins.runtime)
        twins.train(numbers(batch, 6), runtime=twins.runtime, steps=2)


def test_two_boundaries_of_different_branches_may_be_in_flight() -> None:
    twins = Twins(two(lambda s, x: s.b(s.a(x)) if x.shape[0] > 4 else s.b(s.a(x).tanh())), X)
    small, large = numbers(3, 6), numbers(6, 6)
    first, second = twins.runtime.run_prefix(small), twins.runtime.run_prefix(large)
    with torch.no_grad():
        same(twins.whole(small), twins.runtime.run_suffix(first))
        same(twins.whole(large), twins.runtime.run_suffix(second))


def on_self(value: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = two(lambda s, x: s.b(s.a(x).tanh()) if s.flag == 1 else s.b(s.a(x)))()
        model.flag = value
        return model

    return build


def test_a_branch_on_an_attribute_is_refused_by_name_and_welcome_back() -> None:
    twins = Twins(on_self(1), X)
    twins.split.flag = 2
    with pytest.raises(ModuleError, match="attribute 'flag' of the model was 1 when forward read it, now it is 2"):
        twins.runtime.run_prefix(X)
    twins.split.flag = 1
    twins.replay(numbers(3, 6))


ATTRIBUTES: dict[str, tuple[Callable[[nn.Module], Any], Callable[..., bool], Callable[[nn.Module], Any]]] = {
    "an object": (
        lambda m: setattr(m, "cfg", SimpleNamespace(on=True)), lambda m: m.cfg.on, lambda m: setattr(m.cfg, "on", False)
    ),
    "a dict": (lambda m: setattr(m, "cfg", {"on": True}), lambda m: m.cfg["on"], lambda m: m.cfg.update(on=False)),
    "a nested dict": (
        lambda m: setattr(m, "cfg", {"in": {"on": True}}), lambda m: m.cfg["in"]["on"], lambda m: m.cfg["in"].update(on=False)
    ),
    "a dict beside tensors": (
        lambda m: setattr(m, "cfg", {"on": True, "t": torch.ones(1)}), lambda m: m.cfg["on"], lambda m: m.cfg.update(on=False)
    ),
    "a list": (lambda m: setattr(m, "cfg", [True]), lambda m: m.cfg[0], lambda m: m.cfg.__setitem__(0, False)),
    "a module that is not called": (
        lambda m: setattr(m, "drop", nn.Dropout(0.0)), lambda m: m.drop.p == 0, lambda m: setattr(m.drop, "p", 0.5)
    ),
    "the flag of a module that is not called": (
        lambda m: setattr(m, "drop", nn.Dropout(0.0)), lambda m: m.drop.training, lambda m: m.drop.eval()
    ),
    "an attribute of the class": (
        lambda m: setattr(m, "__class__", type("Own", (Fn,), {"on": True})), lambda m: m.on, lambda m: setattr(type(m), "on", False)
    ),
    "an attribute that is not there": (
        lambda m: None, lambda m: not hasattr(m, "off"), lambda m: setattr(m, "off", True)
    ),
    "a module that is missing": (
        lambda m: setattr(m, "side", None), lambda m: m.side is None, lambda m: setattr(m, "side", nn.Tanh())
    ),
    "a function": (
        lambda m: setattr(m, "act", torch.tanh), lambda m: bool((m.act(torch.ones(1)) < 1).item()), lambda m: setattr(m, "act", torch.relu)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_branch_on_python_state_that_changed_is_followed_or_refused(name: str) -> None:
    put, read, change = ATTRIBUTES[name]

    def build() -> nn.Module:
        model = two(lambda s, x: s.b(s.a(x).tanh()) if read(s) else s.b(s.a(x)))()
        put(model)
        return model

    twins = Twins(build, X)
    twins.replay(numbers(3, 6))
    change(twins.whole)
    if type(twins.whole) is Fn:
        change(twins.split)
    either(lambda: twins.replay(numbers(3, 6)))


def test_loss_and_gradients_follow_a_branch_on_the_number_of_steps_kept_in_a_buffer() -> None:
    def build() -> nn.Module:
        model = two(lambda s, x: s.b(s.a(x)) if s.calls.add_(1) < 3 else s.b(s.a(x)) * 2)()
        model.register_buffer("calls", torch.zeros(()))
        return model

    twins = Twins(build, X)
    twins.train(numbers(3, 6), steps=2, runtime=twins.runtime)
    with pytest.raises(WitnessError, match="prepare_split again"):
        twins.train(numbers(3, 6), steps=2, runtime=twins.runtime)


__all__ = ["loss_of"]
