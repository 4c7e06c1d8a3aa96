"""Traps 1 to 4: writes in place, views across the cut, statistics of norms, random draws."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne.errors import FrontierError, GuardError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import Fn, Twins, loss_of, numbers, same

X = numbers(2, 6)
IMAGE = numbers(2, 3, 6, 6)


# 1: writes in place right after the cut


def in_place(name: str) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if name == "relu":
            x = F.relu(x, inplace=True)
        elif name == "add":
            x += 1
        elif name == "mask":
            x.masked_fill_(x.detach() > 0.5, 0.25)
        elif name == "dropout":
            x = F.dropout(x, 0.5, training=True, inplace=True)
        else:
            x[:, 1:3] = 2 * x[:, 3:5]
        return self.b(x)

    return Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 3))


@pytest.mark.parametrize("name", ["relu", "add", "mask", "dropout", "setitem"])
def test_a_write_in_place_right_after_the_cut_trains_as_the_whole(name: str) -> None:
    twins = Twins(lambda: in_place(name), X)
    assert twins.runtime.resplit("cut:1").candidate.written
    twins.train(numbers(3, 6))
    twins.train(numbers(3, 6).requires_grad_(), steps=2)


def test_inplace_relu_module_right_after_the_cut_trains_with_a_frozen_prefix() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), X, boundary="after:0")
    for model in (twins.whole, twins.split):
        model[0].requires_grad_(False)
    twins.train(numbers(3, 6))


def test_a_write_in_place_into_an_input_reaches_the_caller_s_tensor() -> None:
    twins = Twins(lambda: Fn(lambda s, x: s.b(s.a(x.mul_(2))), a=nn.Linear(6, 6), b=nn.Linear(6, 3)), X)
    for cut in twins.cuts():
        mine, theirs = numbers(3, 6), numbers(3, 6)
        with torch.no_grad():
            twins.whole(mine)
        cut.run_suffix(cut.run_prefix(theirs))
        same(mine, theirs, cut.split_id)


def test_the_boundary_keeps_its_values_when_the_suffix_writes_into_them() -> None:
    runtime = Twins(lambda: in_place("add"), X).runtime.resplit("cut:1")
    boundary = runtime.run_prefix(X)
    before = {k: t.clone() for k, t in boundary.tensors.items()}
    first = runtime.run_suffix(boundary)
    same(before, boundary.tensors)
    same(first, runtime.run_suffix(boundary))


# 2: a view and its base across the cut


def base_and_view(written: str) -> nn.Module:
    """`base` and `view` share memory; the write comes after some op that gives room for a cut between."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        base = self.a(x)
        view = base[:, 1:4]
        late = self.b(x)
        if written == "base":
            base.mul_(2)
        elif written == "view":
            view.add_(late[:, :3])
        return self.c(base) + view.sum(1, keepdim=True) + late.mean()

    return Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3))


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("written", ["base", "view", "neither"])
def test_view_and_base_across_the_cut_equal_the_whole_wherever_it_is_safe(written: str, wire: bool) -> None:
    twins = Twins(lambda: base_and_view(written), X)
    twins.replay(numbers(3, 6), wire=wire)
    twins.train(numbers(3, 6), wire=wire)


@pytest.mark.parametrize("written", ["base", "view"])
def test_a_cut_between_a_view_and_a_later_write_is_refused_with_a_way_out(written: str) -> None:
    runtime = Twins(lambda: base_and_view(written), X).runtime
    torn = [c for c in runtime.candidates if not c.safe]
    assert torn
    for candidate in torn:
        with pytest.raises(FrontierError, match=r"writes into memory that .* and .* share.*Nearest safe splits"):
            runtime.resplit(candidate)


def test_a_view_and_base_that_are_not_written_may_both_cross() -> None:
    runtime = Twins(lambda: base_and_view("neither"), X).runtime
    assert all(c.safe for c in runtime.candidates)


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("out", ["returned", "used"])
@pytest.mark.parametrize("step", ["[:, ::2]", "transpose", "expand"])
def test_a_view_that_crosses_alone_and_is_written_keeps_its_strides(step: str, out: str, wire: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x[:, ::2] if step == "[:, ::2]" else x.t() if step == "transpose" else x[:, None, :1].expand(-1, 1, 1)
        x.mul_(2)
        return x if out == "returned" else x + torch.ones_like(x)

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6)), X)
    twins.replay(numbers(3, 6), wire=wire)
    twins.train(numbers(3, 6), wire=wire)


@pytest.mark.parametrize("wire", [False, True])
def test_reshape_that_copied_at_capture_is_still_taken_for_a_view(wire: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(x)
        b = a.reshape(-1, 24)
        c = self.a(x)
        a.add_(1)
        return self.b(b.view(-1, 4, 6) * c)

    example = numbers(2, 6, 4).transpose(1, 2)
    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2)), example)
    assert any(not c.safe for c in twins.runtime.candidates)
    for x in (numbers(3, 4, 6), numbers(3, 6, 4).transpose(1, 2)):
        twins.replay(x, wire=wire)
        twins.train(x, wire=wire)


def test_broadcast_tensors_whose_schema_is_silent_about_aliases_are_views() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b, _ = torch.broadcast_tensors(a, y)
        c = self.b(x)
        a.add_(1)
        return b * c

    inputs = (numbers(2, 1, 6), numbers(2, 4, 6))
    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), *inputs)
    assert any(not c.safe for c in twins.runtime.candidates)
    twins.replay(numbers(3, 1, 6), numbers(3, 4, 6))


# 3: statistics of BatchNorm


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.BatchNorm1d(4, affine=False),
    )


def test_batch_norm_statistics_move_once_per_step_wherever_the_cut_is() -> None:
    twins = Twins(normed, IMAGE)
    before = int(twins.split[1].num_batches_tracked)
    twins.train(numbers(3, 3, 6, 6), steps=2)
    cuts = len([c for c in twins.runtime.candidates if c.safe])
    assert int(twins.split[1].num_batches_tracked) == before + 2 * cuts


def test_batch_norm_in_train_mode_moves_its_statistics_in_replay_too() -> None:
    Twins(normed, IMAGE).replay(numbers(3, 3, 6, 6))


def test_batch_norm_in_eval_mode_moves_nothing() -> None:
    twins = Twins(normed, IMAGE, train=False)
    twins.replay(numbers(3, 3, 6, 6))
    assert int(twins.split[1].num_batches_tracked) == 0


def test_instance_norm_that_tracks_statistics_moves_them_once() -> None:
    twins = Twins(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(64, 2)
        ),
        IMAGE,
    )
    twins.train(numbers(3, 3, 6, 6), steps=2)


def test_prepare_moves_no_statistics_no_gradient_and_no_generator() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(normed(), nn.Dropout(0.5)).train()
    loss_of(model(IMAGE)).backward()
    seen = {
        "state": copy.deepcopy(model.state_dict()),
        "gradients": [p.grad.clone() for p in model.parameters()],
        "rng": torch.get_rng_state(),
        "attributes": {n: set(m.__dict__) for n, m in model.named_modules()},
    }
    held = [id(t) for t in [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]]
    runtime = prepare_split(model, (IMAGE,), split="50%")
    runtime.resplit("25%")
    now = {
        "state": dict(model.state_dict()),
        "gradients": [p.grad for p in model.parameters()],
        "rng": torch.get_rng_state(),
        "attributes": {n: set(m.__dict__) for n, m in model.named_modules()},
    }
    same({**seen, "state": dict(seen["state"]), "attributes": 0}, {**now, "attributes": 0})
    assert seen["attributes"] == now["attributes"]
    assert held == [id(t) for t in [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]]


# 4: random draws


class DropPath(nn.Module):
    """Stochastic depth as timm writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
        return x * keep.div_(0.7)


RANDOM = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout in place": lambda: nn.Dropout(0.4, inplace=True),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "feature dropout": lambda: nn.Dropout1d(0.5),
    "stochastic depth": DropPath,
    "rrelu": nn.RReLU,
    "noise": lambda: Fn(lambda s, x: x + torch.randn_like(x) * torch.rand(x.shape[0], 1)),
    "gumbel softmax": lambda: Fn(lambda s, x: F.gumbel_softmax(x)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_the_draws_are_those_of_the_whole_model_and_so_is_the_generator_after(name: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), RANDOM[name](), nn.Linear(6, 6), RANDOM[name](), nn.Linear(6, 2))

    twins = Twins(build, X)
    twins.train(numbers(3, 6))
    twins.replay(numbers(5, 6))


def test_a_draw_whose_result_is_not_used_still_moves_the_generator() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.rand(x.shape[0])
        x = self.a(x)
        F.dropout(x)
        return self.b(x) + torch.rand(())

    Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2)), X).train(numbers(3, 6))


def test_a_layer_that_a_draw_may_skip_is_followed_or_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if torch.rand(()) < 0.5:
            x = torch.tanh(x)
        return self.b(x)

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2)), X)
    outcomes = set()
    for seed in range(12):
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = twins.whole(X)
        torch.manual_seed(seed)
        try:
            same(expected, twins.runtime.run_suffix(twins.runtime.run_prefix(X)))
            outcomes.add("equal")
        except GuardError:
            outcomes.add("refused")
    assert "equal" in outcomes


def test_dropout_in_eval_draws_nothing() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 2)), X, train=False)
    twins.replay(numbers(3, 6))
    assert not any(n.seeded for n in twins.runtime.plan.nodes)
