"""What a loss asks about a tensor that crosses the cut: all of its gradient, as whole, or an error, since it would be a share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ariadne.runtime.asked
from ariadne import BoundaryPayload, SplitRuntime, SplitSpec, prepare_split
from ariadne.errors import TrainingError

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Features(nn.Module):
    """Returns features beside its output, and uses them once or twice."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and features."""
        features = self.a(x).tanh()
        h = self.b(features).relu()
        return self.c(h + features if self.skips else h), features


def asks_a_gradient(keep: list[Any]) -> Loss:
    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        found = F.mse_loss(output[0], targets) + output[1].pow(2).mean()
        (gradient,) = torch.autograd.grad(found, output[1], retain_graph=True)
        keep.append(gradient)
        return found + (gradient.detach() * output[1]).sum()

    return loss


def hooks(keep: list[Any]) -> Loss:
    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        output[1].register_hook(lambda g: keep.append(g.clone()) or g.clamp(-0.01, 0.01))
        return F.mse_loss(output[0], targets) + output[1].pow(2).mean()

    return loss


def retains(keep: list[Any]) -> Loss:
    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        output[1].retain_grad()
        keep.append(output[1])
        return F.mse_loss(output[0], targets) + output[1].pow(2).mean()

    return loss


def _round(runtime: SplitRuntime, x: torch.Tensor, targets: torch.Tensor, loss: Loss, wire: bool = False) -> None:
    boundary = runtime.run_training_prefix(x)
    sent = BoundaryPayload.from_bytes(boundary.to_bytes()) if wire else boundary
    _, gradients = runtime.train_suffix(sent, targets, loss_fn=loss)
    runtime.backward_prefix(boundary, gradients)


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("make", [asks_a_gradient, hooks, retains])
@pytest.mark.parametrize("skips", [False, True])
def test_a_loss_that_asks_about_features_gets_all_or_is_refused(skips: bool, make: Any, wire: bool) -> None:
    torch.manual_seed(0)
    whole = Features(skips)
    model = copy.deepcopy(whole)
    x, targets = torch.randn(3, 4), torch.randn(3, 3)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:a", trainable=True))
    kept: tuple[list[Any], list[Any]] = ([], [])
    make(kept[0])(whole(x), targets).backward()
    for cut in (c for c in runtime.candidates if c.trainable and c.trainable_prefix):
        half = runtime.resplit(cut)
        model.zero_grad()
        kept[1].clear()
        if len(cut.live) > 1:
            with pytest.raises(
                TrainingError, match=r"loss_fn (asks|registers|calls) .* 'tanh_1', which is made before the cut"
            ):
                _round(half, x, targets, make(kept[1]), wire)
            continue
        _round(half, x, targets, make(kept[1]), wire)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(whole.parameters(), model.parameters(), strict=True))
        a, b = (k[0].grad if make is retains else k[0] for k in kept)
        if cut.cut > 1:  # else the features are made after the cut
            assert torch.equal(a, b)


@pytest.mark.parametrize("cut", ["after:0", "after:1", "after:2"])
def test_what_a_hook_of_the_user_stashed_before_the_cut_is_hooked_whole_or_refused(cut: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    whole, x = copy.deepcopy(model), torch.randn(3, 4)
    stashes: tuple[dict[str, Any], dict[str, Any]] = ({}, {})

    def stash(net: Any, into: dict[str, Any]) -> None:
        net[0].register_forward_hook(lambda module, args, output: into.__setitem__("f", output))

    def loss(into: dict[str, Any]) -> Loss:
        def of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            into["f"].register_hook(lambda g: g.clamp(-0.001, 0.001))
            return F.mse_loss(output, targets)

        return of

    stash(whole, stashes[0])
    stash(model, stashes[1])
    targets = torch.randn(3, 3)
    loss(stashes[0])(whole(x), targets).backward()
    runtime = prepare_split(model, (x,), split=SplitSpec(cut, trainable=True))
    if cut == "after:0":
        _round(runtime, x, targets, loss(stashes[1]))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(whole.parameters(), model.parameters(), strict=True))
    else:
        with pytest.raises(TrainingError, match=r"loss_fn registers a hook on 'm0', .* used before the cut, too"):
            _round(runtime, x, targets, loss(stashes[1]))


@pytest.mark.planted
@pytest.mark.parametrize("make", [asks_a_gradient, hooks, retains])
def test_a_share_is_another_gradient(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal what the loss gets is not what the whole model gives it."""
    monkeypatch.setattr(ariadne.runtime.asked, "_refuse_share", lambda *_: None)
    torch.manual_seed(0)
    whole = Features(True)
    model, x, targets = copy.deepcopy(whole), torch.randn(3, 4), torch.randn(3, 3)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:b", trainable=True))
    kept: tuple[list[Any], list[Any]] = ([], [])
    make(kept[0])(whole(x), targets).backward()
    _round(runtime, x, targets, make(kept[1]))
    a, b = (k[0].grad if make is retains else k[0] for k in kept)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("how", ["register_prehook", "register_hook"])
@pytest.mark.parametrize("skips", [False, True])
def test_a_hook_on_the_node_of_what_crosses_is_whole_or_refused(skips: bool, how: str) -> None:
    torch.manual_seed(0)
    whole = Features(skips)
    model, x, targets = copy.deepcopy(whole), torch.randn(3, 4), torch.randn(3, 3)

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        getattr(output[1].grad_fn, how)(lambda grads, *_: tuple(None if g is None else g * 2 for g in grads))
        return F.mse_loss(output[0], targets) + output[1].pow(2).mean()

    loss(whole(x), targets).backward()
    runtime = prepare_split(model, (x,), split=SplitSpec("after:a", trainable=True))
    for cut in (c for c in runtime.candidates if c.trainable and c.trainable_prefix):
        model.zero_grad()
        crosses = cut.cut > 1
        if crosses and (len(cut.live) > 1 or how == "register_hook"):
            with pytest.raises(TrainingError, match="loss_fn registers a hook on the node of 'tanh_1'"):
                _round(runtime.resplit(cut), x, targets, loss)
        else:
            _round(runtime.resplit(cut), x, targets, loss)
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(whole.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("wire", [False, True])
def test_a_loss_that_asks_for_the_gradient_of_an_input_is_refused_also_where_torch_would_give_none(wire: bool) -> None:
    model, x = Features(False), torch.randn(3, 4, requires_grad=True)
    runtime = prepare_split(model, (x.detach(),), split=SplitSpec("after:a", trainable=True))

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(output[0].sum(), x, create_graph=True, allow_unused=True)
        return output[0].sum() + (0.0 if g is None else g.pow(2).sum())

    with pytest.raises(TrainingError, match=r"inputs of the model and parameters of the prefix lie behind it"):
        _round(runtime, x, torch.zeros(3, 3), loss, wire)
