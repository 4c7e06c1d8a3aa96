"""One hook over the parameters of both halves is refused by name; over those of one half it is called as in the whole model."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ariadne import prepare_split
from ariadne.errors import TrainingError


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def stepped(runtime: Any, x: Tensor, y: Tensor) -> None:
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, y, loss_fn=F.mse_loss)
    runtime.backward_prefix(boundary, gradients)


@pytest.mark.parametrize("fallback", ["refuse", "python"])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_over_all_parameters_is_refused(mode: Literal["all", "any"], fallback: Any) -> None:
    model, calls = model_of(), list[Any]()
    if fallback == "python":
        model.register_forward_pre_hook(lambda module, args: torch.func.functional_call(nn.ReLU(), {}, args))
    register_multi_grad_hook([*model.parameters()], calls.append, mode=mode)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    runtime = prepare_split(model, (x,), split="after:0", fallback=fallback)
    calls.clear()
    with pytest.raises(
        TrainingError, match="a hook waits for the gradients of parameters before the cut and of others after"
    ):
        stepped(runtime, x, y)
    assert not calls
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("side", [0, 2])
def test_a_hook_over_the_parameters_of_one_half_is_called_once(side: int, mode: Literal["all", "any"]) -> None:
    model, found = model_of(), dict[str, list[Any]](ours=[], theirs=[])
    whole = copy.deepcopy(model)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    runtime = prepare_split(model, (x,), split="after:0")
    for one, name in ((model, "ours"), (whole, "theirs")):
        register_multi_grad_hook([*one[side].parameters()], found[name].append, mode=mode)
    stepped(runtime, x, y)
    F.mse_loss(whole(x), y).backward()
    ours, theirs = (
        [t.clone() for got in found[name] for t in ([got] if mode == "any" else got)] for name in ("ours", "theirs")
    )
    assert len(found["ours"]) == len(found["theirs"]) == 1
    assert all(map(torch.equal, ours, theirs))


def test_one_function_on_each_parameter_is_no_hook_of_both_sides() -> None:
    model, calls = model_of(), list[Any]()
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    runtime = prepare_split(model, (x,), split="after:0")
    for p in model.parameters():
        p.register_hook(calls.append)
    stepped(runtime, x, y)
    assert len(calls) == 4
