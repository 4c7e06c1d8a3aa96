"""An autograd function is one op of the plan, by whatever name forward calls its `apply`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec
from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split


class Straight(torch.autograd.Function):
    """Rounds, and passes gradients through, tripled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float = 4.0) -> Tensor:
        return (x * by).round() / by

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 3, None


class Again(torch.autograd.Function):
    """Returns its input as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Late(torch.autograd.Function):
    """A context that is set up later."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + ctx.saved_tensors[0]


class Unbound(torch.autograd.Function):
    """Its forward is no static method."""

    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


class Drawn(torch.autograd.Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


straight, again, late, unbound, drawn = Straight.apply, Again.apply, Late.apply, Unbound.apply, Drawn.apply
TABLE: dict[str, Any] = {"straight": straight}


def by_default(x: Tensor, act: Any = straight) -> Tensor:
    """Called by a default argument."""
    found: Tensor = act(x)
    return found


def closed_over(act: Any) -> Callable[[Tensor], Any]:
    """Called from a closure."""
    return lambda x: act(x)


NAMES: dict[str, Callable[[Tensor], Any]] = {
    "global": lambda x: straight(x),
    "global, with an argument": lambda x: straight(x, 2.0),
    "default": by_default,
    "closure": closed_over(straight),
    "table": lambda x: TABLE["straight"](x),
    "set up later": lambda x: late(x),
    "no static method": lambda x: unbound(x),
    "one after the other": lambda x: late(straight(x)) + Straight.apply(x),
    "that draws": lambda x: drawn(x),
    "its forward alone": lambda x: Straight.forward(None, x) + Late.forward(x),
    "its forward after its apply": lambda x: Straight.forward(None, late(straight(x))),
}


class Net(nn.Module):
    """A function between two layers."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.enter, self.leave, self.act = nn.Linear(4, 4), nn.Linear(4, 2), act

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.act(self.enter(x)))
        return found


def gradients(net: nn.Module) -> list[Tensor]:
    """Those of the parameters, taken away from them."""
    found = [p.grad for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_under_another_name_is_one_op_and_keeps_its_gradient(name: str) -> None:
    torch.manual_seed(0)
    net = Net(NAMES[name])
    runtime = prepare_split(net, (torch.randn(3, 4),), split=SplitSpec("percent:50", trainable=True))
    for batch in (5, 1):
        x = torch.randn(batch, 4)
        torch.manual_seed(batch)
        net(x).square().sum().backward()
        whole = gradients(net)
        torch.manual_seed(batch)
        boundary = runtime.run_training_prefix(x)
        _, crossed = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().sum())
        runtime.backward_prefix(boundary, crossed)
        assert all(torch.equal(a, b) for a, b in zip(whole, gradients(net), strict=True))


def test_another_function_under_that_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(NAMES["global"])
    runtime = prepare_split(net, (torch.randn(3, 4),), split="percent:50")
    monkeypatch.setattr(sys.modules[__name__], "straight", late)
    with pytest.raises(ModuleError, match="straight"):
        runtime.run_prefix(torch.randn(3, 4))


def test_what_hides_a_gradient_is_refused_by_name() -> None:
    class Act(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return again(x)

    with pytest.raises(UnsupportedError, match="returns one of its inputs as it is"):
        prepare_split(Net(Act()), (torch.randn(3, 4),), split="percent:50")


def test_a_function_that_returns_its_input_is_followed_where_it_is_looked_up() -> None:
    net = Net(lambda x: Again.apply(x))
    runtime = prepare_split(net, (torch.randn(3, 4),), split=SplitSpec("percent:50", trainable=True))
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), net(x))
