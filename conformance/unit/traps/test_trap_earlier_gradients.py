"""Trap 27: gradients that were there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from conformance.unit.trap_nets import Body, step
from conformance.unit.trap_twins import Twins, same, seeded, square_loss, state


def test_prepare_leaves_existing_gradients_alone() -> None:
    model = Body(lambda m, x: m.b(x)).train()
    square_loss(model(seeded((2, 6)))).backward()
    held = {n: (p.grad, p.grad.clone(), p.grad._version) for n, p in model.named_parameters()}
    x = seeded((2, 6)).requires_grad_()
    x.grad = torch.full_like(x, 3.0)
    kept = x.grad
    prepare_split(model, (x,), split="50%")
    for name, p in model.named_parameters():
        grad, copy_, version = held[name]
        assert p.grad is grad
        assert grad._version == version
        same(copy_, grad)
    assert x.grad is kept
    assert x.requires_grad
    same(torch.full_like(x, 3.0), x.grad)


def test_prepare_leaves_a_missing_gradient_missing() -> None:
    model = Body(lambda m, x: m.b(x))
    x = seeded((2, 6)).requires_grad_()
    prepare_split(model, (x,), split="50%")
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())


def test_replay_leaves_gradients_alone() -> None:
    twins = Twins(lambda: Body(lambda m, x: m.b(x)), seeded((2, 6)))
    square_loss(twins.split(seeded((2, 6)))).backward()
    held = {n: p.grad.clone() for n, p in twins.split.named_parameters()}
    x = seeded((2, 6)).requires_grad_()
    output = twins.runtime.run_suffix(twins.runtime.run_prefix(x))
    assert not output.requires_grad
    assert x.grad is None
    same(held, {n: p.grad for n, p in twins.split.named_parameters()})


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "once": lambda m, x: m.b(torch.tanh(m.a(x))),
    "again in the suffix": lambda m, x: m.b(torch.tanh(m.a(x))) * x,
    "many times": lambda m, x: (m.a(x) * x + torch.sin(x * 3)) * m.b(x) + torch.tanh(m.b(m.a(x) * 7) * x) + x / 3,
}


class Used(nn.Module):
    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use, self.a, self.b, self.c = use, nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.use(self, x))


@pytest.mark.parametrize("before", [None, 0.37])
@pytest.mark.parametrize("use", USES)
def test_gradients_of_inputs_add_up_as_the_models_do(use: str, before: float | None) -> None:
    twins = Twins(lambda: Used(USES[use]), seeded((2, 6)).requires_grad_())
    for runtime in twins.cuts():
        pair = []
        for _ in range(2):
            x = seeded((3, 6)).requires_grad_()
            if before is not None:
                x.grad = torch.full_like(x, before)
            pair.append(x)
        for _ in range(2):
            square_loss(twins.whole(pair[0])).backward()
            step(runtime, pair[1])
            same(pair[0].grad, pair[1].grad)
            same(state(twins.whole)["gradients"], state(twins.split)["gradients"])
        twins.whole.zero_grad(), twins.split.zero_grad()


def test_gradients_flow_on_through_an_input_that_is_no_leaf() -> None:
    twins = Twins(lambda: Used(USES["again in the suffix"]), seeded((2, 6)))
    for runtime in twins.cuts():
        leaves = [seeded((3, 6)).requires_grad_() for _ in range(2)]
        square_loss(twins.whole(torch.sin(leaves[0]))).backward()
        step(runtime, torch.sin(leaves[1]))
        same(leaves[0].grad, leaves[1].grad)
        same(state(twins.whole)["gradients"], state(twins.split)["gradients"])
        twins.whole.zero_grad(), twins.split.zero_grad()


def test_inputs_with_and_without_gradients_are_told_apart_at_each_call() -> None:
    twins = Twins(lambda: Used(USES["again in the suffix"]), seeded((2, 6)))
    for wants in (True, False, True):
        for runtime in twins.cuts():
            pair = [seeded((3, 6)).requires_grad_(wants) for _ in range(2)]
            square_loss(twins.whole(pair[0])).backward()
            step(runtime, pair[1])
            same(pair[0].grad, pair[1].grad)


def test_a_frozen_model_with_an_input_that_wants_gradients() -> None:
    """As adversarial examples are made."""
    twins = Twins(lambda: Used(USES["many times"]).requires_grad_(False), seeded((2, 6)).requires_grad_())
    for runtime in twins.cuts():
        pair = [seeded((3, 6)).requires_grad_() for _ in range(2)]
        square_loss(twins.whole(pair[0])).backward()
        step(runtime, pair[1])
        same(pair[0].grad, pair[1].grad)
        assert all(p.grad is None for p in twins.split.parameters())


def test_without_an_optimizer_gradients_add_to_those_that_were_there() -> None:
    twins = Twins(lambda: Used(USES["many times"]), seeded((2, 6)))
    for model in (twins.whole, twins.split):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * i) if i % 2 else None
    for runtime in twins.cuts():
        square_loss(twins.whole(seeded((3, 6)))).backward()
        step(runtime, seeded((3, 6)))
        same(state(twins.whole)["gradients"], state(twins.split)["gradients"])


def test_gradients_of_parameters_that_the_model_does_not_use_survive_unless_an_optimizer_has_them() -> None:
    """As the whole model's optimizer, that of all that `suffix_parameters` gives clears them."""

    def build() -> nn.Module:
        model = Used(USES["once"])
        model.unused = nn.Linear(6, 6)
        return model

    twins = Twins(build, seeded((2, 6)))
    for model in (twins.whole, twins.split):
        model.unused.weight.grad = torch.ones(6, 6)
    for runtime in twins.cuts():
        unused, told = {*twins.split.unused.parameters()}, runtime.suffix_parameters()
        assert unused <= {*told}
        optimizer = torch.optim.SGD([p for p in told if p not in unused], lr=0.1)
        step(runtime, seeded((3, 6)), optimizer=optimizer)
        same(torch.ones(6, 6), twins.split.unused.weight.grad)
        assert twins.split.unused.bias.grad is None
        step(runtime, seeded((3, 6)), optimizer=torch.optim.SGD(told, lr=0.1))
        assert twins.split.unused.weight.grad is None
        twins.split.unused.weight.grad = torch.ones(6, 6)
