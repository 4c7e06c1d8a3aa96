"""Preparing leaves no reference to a weight behind: torch may swap it for another; and a parameter is taken as an input."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
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
