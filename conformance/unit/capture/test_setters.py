"""What forward puts into a tensor by no op is refused, or guarded, where it changes nothing at capture, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.capture import setters
from ariadne.errors import UnsupportedError, VerificationError
from conformance.unit.trap_kit import Fn, numbers, same

X = numbers(2, 4)
TRAINS = SplitSpec("50%", trainable=True)


def clamped(s: Any, x: Tensor) -> Tensor:
    s.b.weight.data = s.b.weight.data.clamp(-9, 9)
    return s.b(s.a(x))


def renormed(s: Any, x: Tensor) -> Tensor:
    s.a.weight.data = torch.renorm(s.a.weight.data, p=2, dim=0, maxnorm=99.0)
    return s.b(s.a(x))


def swapped(s: Any, x: Tensor) -> Tensor:
    s.a.weight.data, s.b.weight.data = s.b.weight.data, s.a.weight.data
    return s.b(s.a(x))


def put_back(s: Any, x: Tensor) -> Tensor:
    kept = s.a.weight.data
    s.a.weight.data = kept.round()
    h = s.a(x)
    s.a.weight.data = kept
    return s.b(h)


def of_a_buffer(s: Any, x: Tensor) -> Tensor:
    s.limit.data = s.limit.data.clamp(0, 1)
    return s.b(s.a(x) * s.limit)


def by_torch(s: Any, x: Tensor) -> Tensor:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(s.a.parameters()).detach(), s.a.parameters())
    return s.b(s.a(x))


def of_what_it_makes(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    h.data = h.data * 1
    return s.b(h)


def applied(s: Any, x: Tensor) -> Tensor:
    s.a.weight.data.apply_(lambda v: min(v, 9.0))
    return s.b(s.a(x))


def mapped(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).detach()
    h.map_(h, max)
    return s.b(h)


def without_gradient(s: Any, x: Tensor) -> Tensor:
    s.a.weight.grad = None
    return s.b(s.a(x))


def zeroed(s: Any, x: Tensor) -> Tensor:
    s.a.zero_grad()
    return s.b(s.a(x))


def net(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    model = Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.register_buffer("limit", torch.ones(4))
    model(X)  # what it sets stands
    return model


DATA = [clamped, renormed, swapped, put_back, of_a_buffer, by_torch, of_what_it_makes]


@pytest.mark.parametrize("forward", [*DATA, applied, mapped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_other_data_in_a_tensor_are_refused_though_they_are_equal_now(forward: Any, trains: bool) -> None:
    model = net(forward)
    before = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(
        UnsupportedError, match=r"which no op shows; (write into it by an op|write it with torch's ops)"
    ):
        prepare_split(model, (X,), split=SplitSpec("50%", trainable=trains))
    now = model.state_dict(keep_vars=True)
    assert all(now[name] is t and torch.equal(t, was) for name, (t, was) in before.items())
    model(X)


@pytest.mark.parametrize("forward", [without_gradient, zeroed], ids=lambda f: f.__name__)
def test_a_gradient_that_forward_drops_is_refused_though_there_is_none(forward: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"forward (sets the gradient of|asks 'grad' of .*) a tensor of the model"
    ):
        prepare_split(net(forward), (X,), split=TRAINS)


def test_the_very_memory_that_stands_there_may_be_put_there() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.a.weight.data = s.a.weight.data.contiguous().to(x.device)
        return s.b(s.a(x))

    model = net(forward)
    split = prepare_split(model, (X,), split="50%")
    same(model(X), split.run_suffix(split.run_prefix(X)))


@pytest.mark.parametrize("forward", [clamped, put_back, of_a_buffer], ids=lambda f: f.__name__)
def test_the_models_own_python_sets_them_as_the_model_does(forward: Any) -> None:
    model = net(forward)
    whole = copy.deepcopy(model)
    split = prepare_split(model, (X,), split=SplitSpec("after:a", trainable=True), fallback="python")
    for step in range(3):
        x = numbers(2, 4, seed=step) * 20
        for of in (whole, model):
            of.zero_grad()
        loss = F.mse_loss(whole(x), x)
        loss.backward()
        boundary = split.run_training_prefix(x)
        found, gradients = split.train_suffix(boundary, x, loss_fn=F.mse_loss)
        split.backward_prefix(boundary, gradients)
        same(
            [loss, [p.grad for p in whole.parameters()]], [found, [p.grad for p in model.parameters()]], f"step {step}"
        )
        with torch.no_grad():
            for of in (whole, model):
                for p in of.parameters():
                    p -= 30 * p.grad
    same(whole.state_dict(), model.state_dict(), "state")


def frozen(s: Any, x: Tensor) -> Tensor:
    for p in s.a.parameters():
        p.requires_grad = False
    return s.b(s.a(x))


def frozen_by_its_module(s: Any, x: Tensor) -> Tensor:
    s.a.requires_grad_(False)
    return s.b(s.a(x))


@pytest.mark.parametrize("forward", [frozen, frozen_by_its_module], ids=lambda f: f.__name__)
def test_a_part_that_forward_freezes_and_that_is_thawed_later_is_refused(forward: Any) -> None:
    model = net(forward)
    split = prepare_split(model, (X,), split="50%")
    same(model(X), split.run_suffix(split.run_prefix(X)))
    model.a.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="forward sets requires_grad of a tensor of the model"):
        split.run_prefix(X)


@pytest.mark.planted
def test_where_only_what_changes_is_noticed_a_later_change_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setters, "_is_same_memory", lambda t, value: True)
    model = net(clamped)
    whole = copy.deepcopy(model)
    split = prepare_split(model, (X,), split="50%")
    with torch.no_grad():
        for of in (whole, model):
            of.b.weight.fill_(10.0)
    assert not torch.equal(whole(X), split.run_suffix(split.run_prefix(X)))


@pytest.mark.parametrize("kept", [False, True], ids=["no gradients", "gradients"])
def test_a_gradient_that_forward_takes_of_what_it_made_sets_none(kept: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = s.a(x).detach().requires_grad_()
            (slope,) = torch.autograd.grad(h.pow(3).sum(), h)
        return s.b(h + slope)

    model = net(forward)
    grads = [torch.ones_like(p) for p in model.parameters()] if kept else []
    for p, gradient in zip(model.parameters(), grads, strict=False):
        p.grad = gradient
    split = prepare_split(model, (X,), split="50%")
    same(model(X), split.run_suffix(split.run_prefix(X)))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=False))


def test_code_of_cs_gets_no_address_of_a_tensor_without_data(recwarn: pytest.WarningsRecorder) -> None:
    """It would write there; torch itself warns, and lets it."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        t = h.detach().clone()
        torch._C.TensorBase.apply_(t, lambda v: v * 2)
        return s.b(h + t)

    with pytest.raises(VerificationError, match="what no op shows"):
        prepare_split(net(forward).eval(), (X,), split="50%")
    assert not [w for w in recwarn if "data pointer of FakeTensor" in str(w.message)]
