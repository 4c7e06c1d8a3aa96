"""Traps 1 to 7: writes in place, views across the cut, statistics, random draws, shared and frozen parameters, changed models."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne import prepare_split
from ariadne.errors import FrontierError, GuardError, ModuleError, TrainingError
from conformance.trap_kit import Fn, Twins, loss_of, numbers, over_the_wire, same

X = numbers(2, 6)
IMAGE = numbers(2, 3, 6, 6)


def followed_or_refused(twins: Twins, *args: Any, **kwargs: Any) -> None:
    """The split equals the model as it is now, or a guard says that it does not hold."""
    try:
        twins.replay(*args, **kwargs)
    except GuardError:
        return


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
    twins = Twins(lambda: Fn(lambda s, x: s.b(s.a(x.mul_(2)))), X) if False else Twins(
        lambda: Fn(lambda s, x: s.b(s.a(x.mul_(2))), a=nn.Linear(6, 6), b=nn.Linear(6, 3)), X
    )
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
@pytest.mark.parametrize("step", ["[:, ::2]", "transpose", "expand"])
def test_a_view_that_crosses_alone_and_is_written_keeps_its_strides(step: str, wire: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x[:, ::2] if step == "[:, ::2]" else x.t() if step == "transpose" else x[:, None, :1].expand(-1, 1, 1)
        return x.mul_(2)

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6)), X)
    twins.replay(numbers(3, 6), wire=wire)
    twins.train(numbers(3, 6), wire=wire)


@pytest.mark.parametrize("wire", [False, True])
def test_reshape_that_may_or_may_not_copy_is_taken_for_a_view(wire: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = a.reshape(-1, 3, 2)
        c = self.b(x)
        b.add_(1)
        return a * c

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), X)
    assert any(not c.safe for c in twins.runtime.candidates)
    twins.replay(numbers(3, 6), wire=wire)
    twins.train(numbers(3, 6), wire=wire)


def test_broadcast_tensors_whose_schema_is_silent_about_aliases_are_views() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b, _ = torch.broadcast_tensors(a, y)
        c = self.b(x)
        a.add_(1)
        return b * c

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), X, X)
    assert any(not c.safe for c in twins.runtime.candidates)
    twins.replay(numbers(3, 6), numbers(3, 6))


# 3: statistics of BatchNorm


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.3),
                         nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4, affine=False))  # fmt: skip


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
    twins = Twins(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(),
                                        nn.Linear(64, 2)), IMAGE)  # fmt: skip
    twins.train(numbers(3, 3, 6, 6), steps=2)


def test_prepare_moves_no_statistics_no_gradient_and_no_generator() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(normed(), nn.Dropout(0.5)).train()
    loss_of(model(IMAGE)).backward()
    seen = {"state": copy.deepcopy(model.state_dict()), "gradients": [p.grad.clone() for p in model.parameters()],
            "rng": torch.get_rng_state(), "attributes": {n: set(m.__dict__) for n, m in model.named_modules()}}  # fmt: skip
    held = [id(t) for t in [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]]
    runtime = prepare_split(model, (IMAGE,), split="50%")
    runtime.resplit("25%")
    now = {"state": dict(model.state_dict()), "gradients": [p.grad for p in model.parameters()],
           "rng": torch.get_rng_state(), "attributes": {n: set(m.__dict__) for n, m in model.named_modules()}}  # fmt: skip
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


# 5: parameters that both sides use


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.embed(ids))))


class TiedLinear(nn.Module):
    """One layer used by three calls, so that its gradient has three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.turn(torch.relu(self.turn(torch.tanh(self.turn(x))))))


IDS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize("wire", [False, True])
def test_gradients_of_tied_embeddings_add_up_as_in_the_whole(wire: bool) -> None:
    twins = Twins(Tied, IDS)
    twins.train(torch.arange(9).reshape(3, 3) % 4, wire=wire)
    assert twins.runtime.shared_parameters() == [twins.split.embed.weight]


def test_the_gradient_of_a_layer_called_on_both_sides_has_its_parts_in_the_whole_s_order() -> None:
    Twins(TiedLinear, X).train(numbers(5, 6), steps=4)


def test_gradients_of_a_shared_parameter_accumulate_on_top_of_what_is_there() -> None:
    twins = Twins(TiedLinear, X)
    for runtime in twins.cuts():
        for seed in range(3):
            x = numbers(3, 6, seed=seed)
            loss_of(twins.whole(x)).backward()
            boundary = runtime.run_training_prefix(x)
            _, gradients = runtime.train_suffix(boundary, loss_fn=loss_of)
            runtime.backward_prefix(boundary, gradients)
            same(twins.state(twins.whole)["gradients"], twins.state(twins.split)["gradients"], runtime.split_id)


def test_an_optimizer_of_the_suffix_that_owns_a_shared_parameter_is_refused() -> None:
    twins = Twins(Tied, IDS)
    runtime = twins.runtime
    whole = torch.optim.SGD(runtime.suffix_parameters(), lr=0.1)
    boundary = runtime.run_training_prefix(IDS)
    before = twins.state(twins.split)
    with pytest.raises(TrainingError, match=r"owns 1 parameter\(s\) that the prefix uses too.*optimizer=None"):
        runtime.train_suffix(boundary, loss_fn=loss_of, optimizer=whole)
    same(before, twins.state(twins.split))
    _, gradients = runtime.train_suffix(boundary, loss_fn=loss_of)
    runtime.backward_prefix(boundary, gradients)


def test_a_shared_parameter_may_be_left_to_the_optimizer_of_the_prefix() -> None:
    twins = Twins(Tied, IDS)
    runtime = twins.runtime
    shared = {id(p) for p in runtime.shared_parameters()}
    prefix = torch.optim.SGD(runtime.prefix_parameters(), lr=0.1)
    rest = [p for p in runtime.suffix_parameters() if id(p) not in shared]
    suffix = torch.optim.SGD(rest, lr=0.1) if rest else None
    whole = torch.optim.SGD(twins.whole.parameters(), lr=0.1)
    for step in range(3):
        whole.zero_grad()
        loss_of(twins.whole(IDS)).backward()
        whole.step()
        boundary = runtime.run_training_prefix(IDS)
        _, gradients = runtime.train_suffix(boundary, loss_fn=loss_of, optimizer=suffix)
        runtime.backward_prefix(boundary, gradients, optimizer=prefix)
        same(twins.state(twins.whole), twins.state(twins.split), f"step {step}")


def test_tied_parameters_that_were_untied_after_prepare_are_followed_or_refused() -> None:
    twins = Twins(Tied, IDS, train=False)
    for model in (twins.whole, twins.split):
        model.head.weight = nn.Parameter(numbers(11, 6, seed=4))
    followed_or_refused(twins, IDS)


def test_parameters_that_were_tied_after_prepare_train_as_the_whole() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), X)
    for model in (twins.whole, twins.split):
        model[2].weight = model[0].weight
    twins.train(numbers(3, 6))


# 6: frozen parameters, nothing to train, boundaries of integers


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("frozen", [(0,), (2,), (4,), (0, 2), (2, 4)])
def test_parameters_frozen_after_prepare_get_no_gradient(frozen: tuple[int, ...]) -> None:
    twins = Twins(chain, X)
    for model in (twins.whole, twins.split):
        for i in frozen:
            model[i].requires_grad_(False)
    twins.train(numbers(3, 6), steps=2)


def test_parameters_unfrozen_after_prepare_are_trained() -> None:
    twins = Twins(lambda: chain().requires_grad_(False), X)
    for model in (twins.whole, twins.split):
        model.requires_grad_(True)
    twins.train(numbers(3, 6), steps=2)
    assert all(p.grad is not None for p in twins.split.parameters())


def test_trainable_cuts_follow_parameters_that_are_unfrozen_after_prepare() -> None:
    twins = Twins(lambda: chain().requires_grad_(False), X)
    twins.split[4].requires_grad_(True)
    assert twins.runtime.resplit("after:0").candidate.trainable


def test_a_model_that_asks_whether_its_parameters_are_frozen_is_followed_or_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(torch.tanh(x) if self.a.weight.requires_grad else x)

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2)), X)
    for model in (twins.whole, twins.split):
        model.a.weight.requires_grad_(False)
    try:
        twins.train(numbers(3, 6), steps=1)
        twins.replay(numbers(3, 6))
    except GuardError:
        return


def test_a_prefix_without_parameters_is_trained_and_walked_back() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)), X, boundary="after:0")
    boundary = twins.runtime.run_training_prefix(X)
    _, gradients = twins.runtime.train_suffix(boundary, loss_fn=loss_of)
    assert set(gradients.values()) == {None}
    twins.runtime.backward_prefix(boundary, gradients)
    twins.train(numbers(3, 6))


def test_a_suffix_without_parameters_hands_gradients_back() -> None:
    Twins(lambda: nn.Sequential(nn.Linear(6, 2), nn.Tanh()), X, boundary="after:0").train(numbers(3, 6))


@pytest.mark.parametrize("wire", [False, True])
def test_integers_and_bools_cross_the_boundary_without_gradients(wire: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        best, keep, double = h.argmax(1), h > 0, h.double()
        h = self.b(h).masked_fill(~keep, 0.5)
        return h + self.c(best) + (double * 2).float()

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Embedding(6, 6)), X)
    assert {"i64", "bool"} <= {
        twins.runtime.plan.values[n].describe().split("[")[0].replace("b8", "bool") for c in twins.runtime.candidates for n in c.live
    }
    twins.train(numbers(3, 6), wire=wire)


def test_a_boundary_of_integers_alone_trains_the_suffix() -> None:
    twins = Twins(lambda: Fn(lambda s, x: s.b((x > 0).long().sum(1)), b=nn.Embedding(7, 3)), X)
    twins.train(numbers(3, 6))


def test_a_boundary_value_that_the_loss_does_not_need_gets_none_not_zeros() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        h, unused = self.a(x), self.b(x)
        return {"out": self.c(h), "aux": self.c(unused)}

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 2)), X)
    twins.train(numbers(3, 6), loss=lambda out, _: out["out"].pow(2).mean())
    assert twins.split.b.weight.grad is None


def test_the_gradients_of_inputs_are_those_of_the_whole() -> None:
    twins = Twins(lambda: Fn(lambda s, x, y: s.b(torch.tanh(s.a(x) * y)) + x[:, :2], a=nn.Linear(6, 6), b=nn.Linear(6, 2)), X, X)
    twins.train(numbers(3, 6).requires_grad_(), numbers(3, 6, seed=1).requires_grad_())


# 7: the model changes after prepare


def switched() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("part", ["", "1", "2"])
def test_a_training_flag_flipped_after_prepare_is_refused_by_name_and_welcome_back(train: bool, part: str) -> None:
    twins = Twins(switched, X, train=train)
    was, now = ("train", "eval") if train else ("eval", "train")
    words = re.escape(f"{part!r}" if part else "the model") + rf" was captured in {was} mode and is now in {now} mode.*\.{was}\(\)"
    for runtime in twins.cuts():
        twins.split.get_submodule(part).train(not train)
        with pytest.raises(ModuleError, match=words):
            runtime.run_suffix(runtime.run_prefix(X))
        twins.split.train(train)
        twins.replay(numbers(3, 6), runtime=runtime)


def test_a_flag_flipped_between_prefix_and_suffix_is_refused() -> None:
    runtime = Twins(switched, X).runtime.resplit("cut:1")
    boundary = runtime.run_training_prefix(X)
    runtime.model.eval()
    with pytest.raises(ModuleError, match="eval mode"):
        runtime.train_suffix(boundary, loss_fn=loss_of)


def test_a_model_moved_to_another_dtype_and_back_is_followed() -> None:
    twins = Twins(chain, X)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        twins.whole.to(dtype)
        twins.split.to(dtype)
        for runtime in (twins.runtime, twins.runtime.resplit("after:0")):
            twins.replay(numbers(3, 6).to(dtype), runtime=runtime)
            twins.train(numbers(3, 6).to(dtype), runtime=runtime, steps=2)


def test_a_model_of_integer_inputs_moved_to_another_dtype_is_followed() -> None:
    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.head(h * torch.arange(3, dtype=h.dtype)[:, None] + torch.zeros(3, 6, dtype=self.head.weight.dtype))

    twins = Twins(lambda: Fn(forward, embed=nn.Embedding(9, 6), head=nn.Linear(6, 2)), IDS)
    for dtype in (torch.float64, torch.float32):
        twins.whole.to(dtype)
        twins.split.to(dtype)
        twins.replay(IDS, runtime=twins.runtime)


def test_an_input_of_another_dtype_than_the_model_s_is_refused() -> None:
    twins = Twins(chain, X)
    with pytest.raises(GuardError, match=r"must be f32.*found f64"):
        twins.runtime.run_prefix(X.double())


def test_a_model_moved_to_another_device_is_refused_by_name() -> None:
    twins = Twins(chain, X)
    with pytest.raises(GuardError, match=r"captured on cpu.*found f32\[2, 6\] on meta"):
        twins.runtime.run_prefix(X.to("meta"))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_after_prepare_is_followed(assign: bool) -> None:
    twins = Twins(switched, X)
    torch.manual_seed(5)
    other = switched()
    other(numbers(4, 6))
    for model in (twins.whole, twins.split):
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    twins.replay(numbers(3, 6))
    twins.train(numbers(3, 6), steps=2)


def test_a_replaced_parameter_is_used_and_trained() -> None:
    twins = Twins(chain, X)
    for model in (twins.whole, twins.split):
        model[2].weight = nn.Parameter(numbers(6, 6, seed=3))
    twins.replay(numbers(3, 6))
    twins.train(numbers(3, 6), steps=2)


def test_a_parameter_replaced_by_one_of_another_shape_is_followed_or_refused() -> None:
    twins = Twins(lambda: Fn(lambda s, x: s.a(x) * s.w.shape[0] + s.w.sum(), a=nn.Linear(6, 6), w=nn.Parameter(torch.ones(3))), X)
    for model in (twins.whole, twins.split):
        model.w = nn.Parameter(torch.ones(5))
    followed_or_refused(twins, numbers(3, 6))


def test_a_bias_added_after_prepare_is_followed_or_refused() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)), X)
    for model in (twins.whole, twins.split):
        model[0].bias = nn.Parameter(torch.ones(6))
    followed_or_refused(twins, numbers(3, 6))


def test_a_bias_taken_away_after_prepare_is_followed_or_refused() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), X)
    for model in (twins.whole, twins.split):
        model[0].bias = None
    followed_or_refused(twins, numbers(3, 6))


def test_a_buffer_that_was_none_and_is_set_after_prepare_is_followed_or_refused() -> None:
    def build() -> nn.Module:
        model = Fn(lambda s, x: s.a(x) if s.shift is None else s.a(x) + s.shift, a=nn.Linear(6, 6), b=nn.Identity())
        model.register_buffer("shift", None)
        return nn.Sequential(model, nn.Linear(6, 2))

    twins = Twins(build, X)
    for model in (twins.whole, twins.split):
        model[0].shift = torch.ones(6)
    followed_or_refused(twins, numbers(3, 6))


def test_a_deep_copy_of_the_model_is_not_tied_to_the_runtime() -> None:
    twins = Twins(chain, X)
    other = copy.deepcopy(twins.split)
    with torch.no_grad():
        other[0].weight.zero_()
    twins.replay(numbers(3, 6))


def test_a_deep_copy_of_the_runtime_has_a_model_of_its_own() -> None:
    twins = Twins(switched, X)
    again = copy.deepcopy(twins.runtime)
    assert again.model is not twins.split
    kept = copy.deepcopy(twins.split.state_dict())
    twins_again = SimpleNamespace(runtime=twins.runtime, split=twins.split)
    twins.runtime, twins.split = again, again.model
    twins.train(numbers(3, 6), steps=2)
    twins.replay(numbers(3, 6), runtime=again)
    same(dict(kept), dict(twins_again.split.state_dict()))


def test_a_boundary_of_a_deep_copy_still_fits_the_original() -> None:
    twins = Twins(chain, X)
    again = copy.deepcopy(twins.runtime)
    with torch.no_grad():
        same(twins.whole(X), twins.runtime.run_suffix(over_the_wire(again.run_prefix(X))))
