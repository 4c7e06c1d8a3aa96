"""Traps 11 to 14: groups of outputs, tensors made in forward, names of modules, branches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec
from ariadne.errors import CaptureError, FrontierError, GuardError, ModuleError
from conformance.unit.refusing import prepare_split
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


def test_what_an_lstm_notes_of_its_parameters_is_no_guard() -> None:
    twins = Twins(two(lstm, rnn=lambda: nn.LSTM(6, 6, batch_first=True)), numbers(2, 4, 6))
    for model in (twins.whole, twins.split):
        model.rnn._parameters["weight_hh_l0"] = nn.Parameter(numbers(24, 6))
        model(numbers(2, 4, 6))  # lists its parameters anew
    twins.train(numbers(3, 4, 6))


def rebound(rnn: nn.LSTM) -> None:
    rnn._flat_weights = [w.detach() * 2 for w in rnn._flat_weights]


def swapped(rnn: nn.LSTM) -> None:
    rnn._flat_weights[0] = numbers(24, 6)


def unnoticed(rnn: nn.LSTM) -> None:
    rnn._flat_weight_refs = [None] * 4
    rnn._parameters["weight_hh_l0"] = nn.Parameter(numbers(24, 6))


@pytest.mark.parametrize("change", [rebound, swapped, unnoticed])
def test_an_lstm_that_computes_with_other_weights_than_its_parameters_is_refused(change: Callable[..., Any]) -> None:
    twins = Twins(two(lstm, rnn=lambda: nn.LSTM(6, 6, batch_first=True)), numbers(2, 4, 6))
    change(twins.split.rnn)
    with pytest.raises(ModuleError, match=r"the weights that 'rnn' lists \(_flat_weights\) are not its parameters"):
        twins.replay(numbers(3, 4, 6))


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
            twins.train(numbers(batch, 6), runtime=runtime, steps=2, one=True)


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

    either(act, (GuardError, CaptureError))


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


# 14: branches


def test_a_branch_on_data_is_followed() -> None:
    twins = Twins(two(lambda s, x: s.b(s.a(x) if x.sum() > 0 else -s.a(x))), X.abs())
    for runtime in twins.cuts():
        twins.replay(numbers(3, 6).abs(), runtime=runtime)
        twins.replay(-X.abs(), runtime=runtime)


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
        lambda m: setattr(m, "cfg", SimpleNamespace(on=True)),
        lambda m: m.cfg.on,
        lambda m: setattr(m.cfg, "on", False),
    ),
    "a dict": (lambda m: setattr(m, "cfg", {"on": True}), lambda m: m.cfg["on"], lambda m: m.cfg.update(on=False)),
    "a nested dict": (
        lambda m: setattr(m, "cfg", {"in": {"on": True}}),
        lambda m: m.cfg["in"]["on"],
        lambda m: m.cfg["in"].update(on=False),
    ),
    "a dict beside tensors": (
        lambda m: setattr(m, "cfg", {"on": True, "t": torch.ones(1)}),
        lambda m: m.cfg["on"],
        lambda m: m.cfg.update(on=False),
    ),
    "a list": (lambda m: setattr(m, "cfg", [True]), lambda m: m.cfg[0], lambda m: m.cfg.__setitem__(0, False)),
    "a module that is not called": (
        lambda m: setattr(m, "drop", nn.Dropout(0.0)),
        lambda m: m.drop.p == 0,
        lambda m: setattr(m.drop, "p", 0.5),
    ),
    "the flag of a module that is not called": (
        lambda m: setattr(m, "drop", nn.Dropout(0.0)),
        lambda m: m.drop.training,
        lambda m: m.drop.eval(),
    ),
    "an attribute of the class": (
        lambda m: setattr(m, "__class__", type("Own", (Fn,), {"on": True})),
        lambda m: m.on,
        lambda m: setattr(type(m), "on", False),
    ),
    "an attribute that is not there": (
        lambda m: None,
        lambda m: not hasattr(m, "off"),
        lambda m: setattr(m, "off", True),
    ),
    "a module that is missing": (
        lambda m: setattr(m, "side", None),
        lambda m: m.side is None,
        lambda m: setattr(m, "side", nn.Tanh()),
    ),
    "a function": (
        lambda m: setattr(m, "act", torch.tanh),
        lambda m: bool((m.act(torch.ones(1)) < 1).item()),
        lambda m: setattr(m, "act", torch.relu),
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_branch_on_python_state_that_changed_is_followed_or_refused(name: str) -> None:
    put, read, change = ATTRIBUTES[name]

    def build() -> nn.Module:
        model = two(lambda s, x: s.b(s.a(x).tanh()) if read(s) else s.b(s.a(x)))()
        put(model)
        return model

    twins = Twins(build, X)
    twins.replay(numbers(3, 6))
    cuts = list(twins.cuts())
    twins.both(change)
    twins.held(cuts, numbers(3, 6))


def test_loss_and_gradients_follow_a_branch_on_the_number_of_steps_kept_in_a_buffer() -> None:
    def build() -> nn.Module:
        model = two(lambda s, x: s.b(s.a(x)) if s.calls.add_(1) < 3 else s.b(s.a(x)) * 2)()
        model.register_buffer("calls", torch.zeros(()))
        return model

    twins = Twins(build, X)
    twins.train(numbers(3, 6), steps=2, runtime=twins.runtime)
    twins.train(numbers(3, 6), steps=2, runtime=twins.runtime)
