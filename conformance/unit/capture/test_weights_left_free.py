"""Preparing leaves no reference to a weight behind: torch may swap it for another; and a parameter is taken as an input."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import MixedSplit, PythonSplit, SplitRuntime, SplitSpec, prepare_split
from ariadne.capture import foreseen, symbolic
from conformance.unit.trap_kit import Fn, numbers, same

X = numbers(3, 4)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What stands in cycles stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def swapping() -> Iterator[None]:
    """Modules swap their weights where they convert or load them."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def swapped(m: nn.Sequential) -> torch.Tensor:
    for mine, other in zip(m.parameters(), net().parameters(), strict=True):
        torch.utils.swap_tensors(mine, other)
    return X


def loaded(m: nn.Sequential) -> torch.Tensor:
    m.load_state_dict(net().state_dict())
    return X


def converted(m: nn.Sequential) -> torch.Tensor:
    m.double()
    return X.double()


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("change", [swapped, loaded, converted], ids=lambda f: f.__name__)
@pytest.mark.usefixtures("uncollected", "swapping")
def test_weights_are_swapped_after_preparing(change: Callable[[Any], torch.Tensor], trainable: bool) -> None:
    model = net()
    runtime = prepare_split(model, (X,), split=SplitSpec("after:1", trainable=trainable))
    x = change(model)
    with torch.no_grad():
        same(model(x), runtime.run_suffix(runtime.run_prefix(x)), "after the change")


@pytest.mark.planted
@pytest.mark.usefixtures("uncollected")
def test_what_fake_tensors_were_made_of_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (symbolic, foreseen):
        monkeypatch.setattr(module, "forget_real", lambda fake: None)
    model = net()
    prepare_split(model, (X,), split="after:1")
    with pytest.raises(RuntimeError, match="weakref"):
        swapped(model)


def whole_again(s: Any, x: torch.Tensor) -> Any:
    z = x.contiguous()  # of a contiguous tensor it is that tensor
    z.add_(1)
    return s.b(s.a(x)), z


def view(s: Any, x: torch.Tensor) -> Any:
    z = x[:, :2]
    z.add_(1)
    return s.b(s.a(x))


def reshaped(s: Any, x: torch.Tensor) -> Any:
    z = x.reshape(x.shape)
    z.mul_(2)
    return s.b(s.a(x)), x


@pytest.mark.parametrize("given", [nn.Parameter, lambda x: x.requires_grad_()], ids=["parameter", "leaf"])
@pytest.mark.parametrize("forward", [whole_again, view, reshaped], ids=lambda f: f.__name__)
def test_what_requires_grad_is_written_where_none_is_taken(forward: Any, given: Any) -> None:
    model = Fn(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3)).eval()
    runtime = prepare_split(model, (X.clone(),), split="after:a")
    mine, theirs = given(X.clone()), given(X.clone())
    with torch.no_grad():
        found, expected = runtime.run_suffix(runtime.run_prefix(mine)), model(theirs)
        values = lambda out: [t.detach().clone() for t in (out if isinstance(out, tuple) else (out,))]  # noqa: E731
        same(values(expected), values(found), "the results")
        same(theirs.detach(), mine.detach(), "what was given")


class Tied(nn.Module):
    """An embedding that is also the head's weight."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.embed, self.mid, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        h = self.mid(self.embed(i))
        if self.branches and h.sum() > 1e9:  # which no graph holds
            h = h.sin()
        return self.head(h.relu())


def grown(m: Any) -> None:
    m.zero_grad()
    m.embed.weight.data = torch.cat([m.embed.weight.data, torch.ones(2, 8)])


def trained(runtime: Any, i: torch.Tensor) -> None:
    boundary = runtime.run_training_prefix(i)
    _, found = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().mean())
    runtime.backward_prefix(boundary, found)


KINDS = [
    pytest.param("refuse", SplitRuntime, id="graph"),
    pytest.param("python", PythonSplit, id="python", marks=pytest.mark.variants),
    pytest.param("python-suffix", MixedSplit, id="python-suffix", marks=pytest.mark.variants),
]


@pytest.mark.parametrize(("fallback", "kind"), KINDS)
@pytest.mark.usefixtures("uncollected")
def test_a_weight_that_grows_after_preparing_is_trained(fallback: Any, kind: type) -> None:
    """What accumulates a weight's gradient remembers its shape for as long as anything holds it."""
    i = torch.arange(6).reshape(2, 3)
    model = Tied(branches=fallback != "refuse")
    twin = copy.deepcopy(model)
    runtime = prepare_split(model, (i,), split=SplitSpec("after:mid", trainable=True, max_paths=1), fallback=fallback)
    assert type(runtime) is kind
    trained(runtime, i)
    grown(model)
    grown(twin)
    trained(runtime, i)
    model(i).square().mean().backward()
    for _ in range(2):
        twin(i).square().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        same(theirs.grad, mine.grad, "the gradients")
