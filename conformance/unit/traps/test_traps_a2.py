"""Traps 5 to 7: parameters that are shared or frozen, boundaries of integers, models that change after prepare."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError, GuardError, ModuleError, TrainingError
from ariadne.plan import TracePlan
from conformance.unit.trap_kit import Fn, Twins, loss_of, numbers, over_the_wire, same

X = numbers(2, 6)
IMAGE = numbers(2, 3, 6, 6)


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


def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.inner(x).relu()
    return self.outer(x + torch.arange(x.shape[1], device=x.device))


def split_counting() -> SplitRuntime:
    return Twins(lambda: Fn(counting, inner=nn.Linear(6, 6), outer=nn.Linear(6, 2)), X).runtime


def test_a_suffix_runs_where_its_process_moved_the_model_unless_it_makes_tensors_where_it_was() -> None:
    edge, server = split_counting(), split_counting()
    server.model.to("meta")  # stands for a GPU
    first, last = "after:inner", edge.candidates[-1].split_id  # before that tensor is made, and after

    def served(cut: str) -> torch.Tensor:
        data = edge.resplit(cut).run_prefix(X).to_bytes()
        output: torch.Tensor = server.resplit(cut).run_suffix(BoundaryPayload.from_bytes(data, device="meta"))
        return output

    assert served(last).device.type == "meta"
    with pytest.raises(
        BoundaryError, match=r"boundary is on meta, .* makes tensors or .* on cpu, .*device='cpu'.* prepare it anew"
    ):
        served(first)


def test_halves_prepared_on_two_devices_have_one_signature() -> None:
    """As a plan captured on a GPU would be: each device of the plan another one."""
    plan = split_counting().plan
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")

    def moved(plan: TracePlan, args: bool) -> TracePlan:
        values = {name: replace(v, device=v.device and "cuda:0") for name, v in plan.values.items()}
        nodes = [
            replace(n, kwargs=tuple((k, gpu if v == cpu else v) for k, v in n.kwargs)) if args else n
            for n in plan.nodes
        ]
        return replace(plan, values=values, nodes=tuple(nodes))

    assert any(v == cpu for n in plan.nodes for _, v in n.kwargs)
    assert moved(plan, True).signature == plan.signature
    assert moved(plan, False).signature != plan.signature, "one makes a tensor beside its inputs, the other elsewhere"


@pytest.mark.parametrize(
    ("wire", "words"),
    [(False, "the prefix uses too.*optimizer=None"), (True, "both sides use .*add the shares of both processes")],
)
def test_an_optimizer_of_the_suffix_that_owns_a_shared_parameter_is_refused(wire: bool, words: str) -> None:
    twins = Twins(Tied, IDS)
    runtime = twins.runtime
    whole = torch.optim.SGD(runtime.suffix_parameters(), lr=0.1)
    boundary = runtime.run_training_prefix(IDS)
    given = over_the_wire(boundary) if wire else boundary
    before = twins.state(twins.split)
    with pytest.raises(TrainingError, match=rf"owns 1 parameter\(s\) that {words}"):
        runtime.train_suffix(given, loss_fn=loss_of, optimizer=whole)
    same(before, twins.state(twins.split))
    _, gradients = runtime.train_suffix(given, loss_fn=loss_of)
    runtime.backward_prefix(boundary, gradients)


def test_shares_of_a_shared_parameter_in_two_processes_add_up_to_its_gradient() -> None:
    edge, server = Twins(Tied, IDS), Twins(Tied, IDS)
    copies = [twins.runtime.shared_parameters()[0] for twins in (edge, server)]
    front = torch.optim.SGD(edge.runtime.prefix_parameters(), lr=0.1)
    for _ in range(2):
        edge.whole.zero_grad()
        loss_of(edge.whole(IDS)).backward()
        boundary = edge.runtime.run_training_prefix(IDS)
        _, gradients = server.runtime.train_suffix(over_the_wire(boundary), loss_fn=loss_of)
        with pytest.raises(TrainingError, match=r"optimizer of the prefix owns 1 parameter\(s\) that both sides use"):
            edge.runtime.backward_prefix(boundary, gradients, optimizer=front)
        edge.runtime.backward_prefix(boundary, gradients)
        torch.testing.assert_close(copies[0].grad + copies[1].grad, edge.whole.embed.weight.grad)
        edge.split.zero_grad()
        server.split.zero_grad()


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
    cuts = list(twins.cuts())
    for model in (twins.whole, twins.split):
        model.head.weight = nn.Parameter(numbers(11, 6, seed=4))
    twins.held([*cuts, *twins.cuts()], IDS)


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


@pytest.mark.parametrize("train", [True, False])
def test_a_model_that_asks_whether_its_parameters_are_frozen_is_followed_or_refused(train: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(torch.tanh(x) if self.a.weight.requires_grad else x)

    twins = Twins(lambda: Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2)), X)
    twins.both(lambda m: m.a.weight.requires_grad_(False))
    try:
        if train:
            twins.train(numbers(3, 6), steps=1, runtime=twins.runtime)
        else:
            twins.replay(numbers(3, 6), runtime=twins.runtime)
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
        twins.runtime.plan.values[n].describe().split("[")[0].replace("b8", "bool")
        for c in twins.runtime.candidates
        for n in c.live
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
    twins = Twins(
        lambda: Fn(lambda s, x, y: s.b(torch.tanh(s.a(x) * y)) + x[:, :2], a=nn.Linear(6, 6), b=nn.Linear(6, 2)), X, X
    )
    twins.train(numbers(3, 6).requires_grad_(), numbers(3, 6, seed=1).requires_grad_())


# 7: the model changes after prepare


def switched() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("part", ["", "1", "2"])
def test_a_training_flag_flipped_after_prepare_is_refused_by_name_and_welcome_back(train: bool, part: str) -> None:
    twins = Twins(switched, X, train=train)
    was, now = ("train", "eval") if train else ("eval", "train")
    words = (
        re.escape(f"{part!r}" if part else "the model")
        + rf" was captured in {was} mode and is now in {now} mode.*\.{was}\(\)"
    )
    for cut in twins.cuts():
        runtime = cut.resplit(on_change="refuse")
        twins.split.get_submodule(part).train(not train)
        with pytest.raises(ModuleError, match=words):
            runtime.run_suffix(runtime.run_prefix(X))
        twins.split.train(train)
        twins.whole.load_state_dict(twins.split.state_dict())
        twins.replay(numbers(3, 6), runtime=runtime)


def test_a_flag_flipped_between_prefix_and_suffix_is_refused() -> None:
    runtime = Twins(switched, X).runtime.resplit("cut:1")
    boundary = runtime.run_training_prefix(X)
    runtime.model.eval()
    with pytest.raises(ModuleError, match="eval mode"):
        runtime.train_suffix(boundary, loss_fn=loss_of)


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_model_moved_to_another_dtype_and_back_is_followed_by_cuts_made_before_and_after(cut: str) -> None:
    twins = Twins(chain, X)
    runtime = twins.runtime.resplit("after:0")
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        twins.both(lambda m, dtype=dtype: m.to(dtype))
        if cut == "after":
            runtime = twins.runtime.resplit("after:0")
        twins.replay(numbers(3, 6).to(dtype), runtime=runtime)
        twins.train(numbers(3, 6).to(dtype), runtime=runtime, steps=2)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "eval": lambda m: m.eval(),
    "one module in eval": lambda m: m[2].eval(),
    "a module replaced": lambda m: m.__setitem__(1, nn.Tanh()),
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: torch.zeros(_[2].shape)),
    "an attribute": lambda m: setattr(m[2], "p", 0.25),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_cut_made_after_the_model_changed_follows_it_or_is_refused(name: str) -> None:
    twins = Twins(switched, X)
    twins.both(CHANGES[name])
    for candidate in [c for c in twins.runtime.candidates if c.safe]:
        try:
            runtime = twins.runtime.resplit(candidate)
        except GuardError:
            continue
        twins.held([runtime], numbers(3, 6))


def test_a_deep_copy_made_after_the_model_changed_follows_it_or_is_refused() -> None:
    twins = Twins(switched, X)
    twins.both(lambda m: m.eval())
    try:
        again = copy.deepcopy(twins.runtime)
    except GuardError:
        return
    twins.split = again.model
    twins.held([again], numbers(3, 6))


def test_a_model_of_integer_inputs_moved_to_another_dtype_is_followed() -> None:
    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.head(
            h * (torch.arange(3, dtype=h.dtype) / 7)[:, None] + torch.zeros(3, 6, dtype=self.head.weight.dtype)
        )

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
    twins = Twins(
        lambda: Fn(lambda s, x: s.a(x) * s.w.shape[0] + s.w.sum(), a=nn.Linear(6, 6), w=nn.Parameter(torch.ones(3))), X
    )
    cuts = list(twins.cuts())
    for model in (twins.whole, twins.split):
        model.w = nn.Parameter(torch.ones(5))
    twins.held([*cuts, *twins.cuts()], numbers(3, 6))


def test_a_bias_added_after_prepare_is_followed_or_refused() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)), X)
    cuts = list(twins.cuts())
    for model in (twins.whole, twins.split):
        model[0].bias = nn.Parameter(torch.ones(6))
    twins.held([*cuts, *twins.cuts()], numbers(3, 6))


def test_a_bias_taken_away_after_prepare_is_followed_or_refused() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), X)
    cuts = list(twins.cuts())
    for model in (twins.whole, twins.split):
        model[0].bias = None
    twins.held([*cuts, *twins.cuts()], numbers(3, 6))


def test_a_buffer_that_was_none_and_is_set_after_prepare_is_followed_or_refused() -> None:
    def build() -> nn.Module:
        model = Fn(lambda s, x: s.a(x) if s.shift is None else s.a(x) + s.shift, a=nn.Linear(6, 6), b=nn.Identity())
        model.register_buffer("shift", None)
        return nn.Sequential(model, nn.Linear(6, 2))

    twins = Twins(build, X)
    cuts = list(twins.cuts())
    for model in (twins.whole, twins.split):
        model[0].shift = torch.ones(6)
    twins.held([*cuts, *twins.cuts()], numbers(3, 6))


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
