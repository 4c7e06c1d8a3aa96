"""What stands in the class of a model is guarded by whichever way forward comes to that class: as an argument, out of a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne.guards.baseline
from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Frame:
    """Made in forward, so that no name leads from the model to it."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net


def used(frame: Frame, h: Tensor) -> Tensor:
    """By a function of the class, asked for by what forward made."""
    found: Tensor = type(frame.net).turned(h)  # type: ignore[attr-defined]
    return found


def given(cls: Any, h: Tensor) -> Tensor:
    """By a function of the class, which is an argument."""
    return cls.turned(h)  # type: ignore[no-any-return]


class Two:
    number = 2.0


class Three:
    number = 3.0


SHAPES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of what forward made": lambda net, h: used(Frame(net), h),
    "in a list": lambda net, h: [type(net)][0].turned(h),  # type: ignore[attr-defined]
    "in a dict": lambda net, h: {"class": type(net)}["class"].turned(h),  # type: ignore[attr-defined]
    "as an argument": lambda net, h: given(type(net), h),
    "by a variable's name": lambda net, h: next(getattr(type(net), name)(h) for name in ("turned",)),
    "another class in the class": lambda net, h: h * net.kind().number,
}


def fresh(shape: str) -> nn.Module:
    class Net(nn.Module):
        turned = staticmethod(lambda h: h * 2)
        kind: type = Two
        unnamed = staticmethod(lambda h: h * 2)

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(SHAPES[shape](self, self.first(x)))  # type: ignore[no-any-return]

    return Net()


def change(net: Any) -> None:
    type(net).turned, type(net).kind = staticmethod(lambda h: h * 3), Three


@torch.no_grad()
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_what_stands_in_the_class_is_guarded(shape: str) -> None:
    net = fresh(shape)
    split, whole = prepare_split(net, (X,), split="after:first"), net(X)
    type(net).unnamed = staticmethod(lambda h: h * 3)  # type: ignore[attr-defined]
    assert torch.equal(split.run_suffix(split.run_prefix(X)), whole)
    change(net)
    assert not torch.equal(net(X), whole)
    with pytest.raises(ModuleError, match="undo that, or call prepare_split again"):
        split.run_prefix(X)


@torch.no_grad()
@pytest.mark.planted
def test_without_what_is_kept_of_classes_that_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ariadne.guards.baseline, "of_classes", lambda *_: ())
    net = fresh("in a list")
    split = prepare_split(net, (X,), split="after:first")
    change(net)
    assert not torch.equal(split.run_suffix(split.run_prefix(X)), net(X))
