"""Trap 21: the structure changes after prepare."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ariadne import SplitRuntime
from ariadne.errors import GuardError, ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_nets import Net
from conformance.unit.trap_twins import Twins, either, same, seeded, square_loss, state


def replaced_same_kind(model: Any) -> None:
    torch.manual_seed(3)
    model.second = nn.Linear(8, 8)


def replaced_other_kind(model: Any) -> None:
    model.act = nn.Sigmoid()


def assigned_state(model: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)


def assigned_doubles(model: Any) -> None:
    model.load_state_dict({k: v.double() for k, v in model.state_dict().items()}, assign=True)


def forward_hook(model: Any) -> None:
    model.second.register_forward_hook(lambda module, args, out: out * 2)


def forward_pre_hook(model: Any) -> None:
    model.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def model_hook(model: Any) -> None:
    model.register_forward_hook(lambda module, args, out: out * 2)


def backward_hook(model: Any) -> None:
    model.second.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))


def parameter_hook(model: Any) -> None:
    model.second.weight.register_hook(lambda g: g * 2)


def no_bias(model: Any) -> None:
    model.second.bias = None


def new_weight(model: Any) -> None:
    torch.manual_seed(6)
    model.second.weight = nn.Parameter(torch.randn(8, 8))


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.second)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.second, "weight", amount=0.5)


def new_forward(model: Any) -> None:
    model.second.forward = lambda x: x * 2


def new_class(model: Any) -> None:
    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.second.__class__ = Other


def tied(model: Any) -> None:
    model.second.weight = nn.Parameter(model.first.weight.new_ones(8, 8))
    model.second.bias = model.first.bias


def frozen(model: Any) -> None:
    model.second.requires_grad_(False)


def swapped(model: Any) -> None:
    model.first, model.second = model.first, copy.deepcopy(model.second)


CHANGES = [
    replaced_same_kind, replaced_other_kind, assigned_state, forward_hook, forward_pre_hook, model_hook, backward_hook,
    parameter_hook, no_bias, new_weight, parametrized, pruned, new_forward, new_class, tied, frozen, swapped,
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "when"),
    [(c, "before the call") for c in CHANGES]
    + [
        (c, "between the halves") for c in CHANGES if c not in (assigned_state, replaced_other_kind)
    ],  # the suffix's alone
)
def test_a_model_that_changed_is_followed_or_refused(change: Callable[[nn.Module], None], when: str) -> None:
    twins = Twins(Net, seeded((2, 6)))
    x = seeded((3, 6), 8)
    for cut in ("cut:1", "cut:2"):
        whole, runtime = copy.deepcopy(twins.whole), copy.deepcopy(twins.runtime.resplit(cut))
        change(whole)
        if when == "before the call":
            change(runtime.model)
        with torch.no_grad():
            want = whole(x)
        square_loss(whole(x)).backward()

        def replay(runtime: SplitRuntime = runtime, want: Any = want) -> None:
            same(want, runtime.run_suffix(runtime.run_prefix(x)))

        def train(runtime: SplitRuntime = runtime, whole: nn.Module = whole) -> None:
            boundary = runtime.run_training_prefix(x)
            if when == "between the halves":
                change(runtime.model)
            _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
            runtime.backward_prefix(boundary, gradients)
            same(state(whole)["gradients"], state(runtime.model)["gradients"])

        if when == "before the call":
            either(replay, GuardError, "prepare")
        either(train, GuardError, "prepare")


@pytest.mark.parametrize("change", [assigned_state, new_weight, frozen, parameter_hook], ids=lambda c: c.__name__)
def test_new_parameters_in_the_same_place_are_followed(change: Callable[[nn.Module], None]) -> None:
    twins = Twins(Net, seeded((2, 6)))
    change(twins.whole)
    change(twins.split)
    twins.step_whole = torch.optim.SGD(twins.whole.parameters(), lr=0.002, momentum=0.9)
    twins.step_split = torch.optim.SGD(twins.split.parameters(), lr=0.002, momentum=0.9)
    twins.hold(6)


def test_parameters_assigned_in_another_dtype_are_followed() -> None:
    twins = Twins(Net, seeded((2, 6)))
    for model in (twins.whole, twins.split):
        assigned_doubles(model)
    twins.replay(seeded((2, 6)).double())


def test_a_backward_hook_is_refused_at_prepare() -> None:
    net = Net()
    backward_hook(net)
    with pytest.raises(UnsupportedError, match=r"'second' has a backward hook.*remove it"):
        prepare_split(net, (seeded((2, 6)),), split="50%")


@pytest.mark.parametrize("hook", [forward_hook, forward_pre_hook, model_hook], ids=lambda c: c.__name__)
def test_hooks_that_were_there_at_prepare_are_part_of_the_plan_until_removed(hook: Callable[[nn.Module], None]) -> None:
    def build() -> nn.Module:
        net = Net()
        hook(net)
        return net

    twins = Twins(build, seeded((2, 6)))
    twins.hold(6, batches=(1, 3))
    for model in (twins.whole, twins.split):
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(model, table).clear()
            getattr(model.second, table).clear()
    with pytest.raises(ModuleError, match=r"hooks of.*changed.*prepare"):
        twins.runtime.run_prefix(seeded((2, 6)))


def test_a_hook_is_seen_in_a_table_that_was_put_there_later() -> None:
    twins = Twins(Net, seeded((2, 6)))
    twins.split.second._forward_hooks = collections.OrderedDict()
    twins.replay(seeded((2, 6)))
    handle = seeded((2, 6)).requires_grad_().register_hook(lambda grad: None)  # of a tensor: it concerns no module
    twins.replay(seeded((2, 6)))
    handle.remove()
    handle = twins.split.second.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(ModuleError, match=r"hooks of 'second' \(forward_hooks\) changed"):
        twins.runtime.run_suffix(twins.runtime.run_prefix(seeded((2, 6))))
    handle.remove()
    twins.replay(seeded((2, 6)))


def test_a_global_hook_is_refused_while_it_is_there() -> None:
    twins = Twins(Net, seeded((2, 6)))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        with pytest.raises(ModuleError, match="global module hook"):
            twins.runtime.run_prefix(seeded((2, 6)))
    finally:
        handle.remove()
    twins.replay(seeded((2, 6)))


class Options(nn.Module):
    """Reads settings of every kind at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)
        self.scale, self.kind, self.on, self.sizes, self.table = 0.7, "tanh", True, [1, 2], {"k": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = getattr(torch, self.kind)(self.drop(self.a(x)) * self.scale)
        return self.b((x + 1 if self.on else x) * self.sizes[1] * self.table["k"])


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "float": lambda m: setattr(m, "scale", 3.0),
    "str": lambda m: setattr(m, "kind", "sigmoid"),
    "bool": lambda m: setattr(m, "on", False),
    "a list": lambda m: setattr(m, "sizes", [1, 5]),
    "inside a list": lambda m: m.sizes.__setitem__(1, 5),
    "inside a dict": lambda m: m.table.update(k=1.0),
    "of a submodule": lambda m: setattr(m.drop, "p", 0.1),
    "deleted": lambda m: delattr(m, "on"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_forward_reads_is_followed_or_refused(option: str) -> None:
    twins = Twins(Options, seeded((2, 6)), train=True)
    twins.hold(6, batches=(1, 3))
    cuts = twins.cuts()
    for model in (twins.whole, twins.split):
        OPTIONS[option](model)
    if option == "deleted":
        with pytest.raises(ModuleError, match="'on'"):
            twins.runtime.run_prefix(seeded((2, 6)))
        return
    for cut in cuts:
        either(lambda cut=cut: twins.train(seeded((2, 6)), steps=1, cuts=[cut]), ModuleError, "prepare")
