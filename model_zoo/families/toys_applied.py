"""Toys of autograd functions that forward calls by other names than `Function.apply`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Leaky(torch.autograd.Function):
    """Zero below zero; its gradient leaks there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leak: float = 0.25) -> Tensor:
        ctx.save_for_backward(x)
        ctx.leak = leak
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, gradient, gradient * ctx.leak), None


class _Leakier(_Leaky):
    """The same forward with a gradient of its own."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 3, None


class _Halved(torch.autograd.Function):
    """Writes into what it is given."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient * 2


class _Split(torch.autograd.Function):
    """Two results, of which one is whole numbers; its forward knows no context."""

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return x * scale, (x > 0).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return gradient * ctx.scale * 1.5, None


_leaky, _leakier, _halved, _split = _Leaky.apply, _Leakier.apply, _Halved.apply, _Split.apply


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)


@toy("applied_by_global")
class AppliedByGlobal(_Layers):
    """`f = Function.apply` of a module, of a function, of its heir, and under `no_grad`."""

    def forward(self, x: Tensor) -> Tensor:
        h = _leakier(self.enter(x))
        with torch.no_grad():
            gate = _leaky(h, 0.5)
        h = _leaky(self.middle(h), 0.5) + gate
        found: Tensor = self.leave(h)
        return found


@toy("applied_by_attribute")
class AppliedByAttribute(_Layers):
    """`f = Function.apply` of a class, of an instance and of a table; one of the functions writes into its input."""

    halve = staticmethod(_halved)

    def __init__(self) -> None:
        super().__init__()
        self.act = _leaky
        self.acts = {"leakier": _leakier}

    def forward(self, x: Tensor) -> Tensor:
        h = self.halve(self.act(self.enter(x)))
        h = self.acts["leakier"](self.middle(h))
        found: Tensor = self.leave(h)
        return found


@toy("applied_by_default")
class AppliedByDefault(_Layers):
    """`f = Function.apply` as a default argument, of a function with two results and a context that is set up later."""

    def forward(self, x: Tensor, split: Any = _split) -> Tensor:
        h, signs = split(self.enter(x))
        h, _ = split(self.middle(h) + signs, 0.75)
        found: Tensor = self.leave(h)
        return found


ENTRIES = tuple(toy.entries)
