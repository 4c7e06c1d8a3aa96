"""Toys about parameters, autograd and the modes that Python can ask for."""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import call, dense, integers

toy = Toys()


@toy("tied_embedding", "tied int-input", call(integers(0, 32, 6)))
class TiedEmbedding(nn.Module):
    """The embedding at the start is the output layer at the end: its gradient has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.middle(self.embed(indices))))
        return logits


@toy("called_twice")
class CalledTwice(nn.Module):
    """One layer is called three times, with other things between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.shared, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(self.enter(x)))
        h = torch.sigmoid(self.shared(h))
        found: Tensor = self.leave(self.shared(h))
        return found


@toy("frozen_part", "frozen")
def _frozen_part() -> nn.Module:
    """The first half has nothing to train, nor has one layer of the second."""
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)
    )
    for frozen in (model[0], model[2], model[4]):
        frozen.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    return model


@toy("unused_parameter", "unused")
class UnusedParameter(nn.Module):
    """A layer that is never called, and one that adds 0 times its output: a gradient of None and one of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.never, self.nought = nn.Linear(3, 3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        found: Tensor = self.leave(h) + 0 * self.nought(h)
        return found


@toy("weight_norm")
def _weight_norm() -> nn.Module:
    """Weights that are computed in forward from a direction and a length."""
    middle = parametrizations.weight_norm(nn.Linear(16, 16))
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), middle, nn.Tanh(), nn.Linear(16, 4))


@toy("spectral_norm", "state")
def _spectral_norm() -> nn.Module:
    """Weights divided by their largest singular value; in training each forward moves two buffers to estimate it."""
    middle = parametrizations.spectral_norm(nn.Linear(16, 16))
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), middle, nn.Tanh(), nn.Linear(16, 4))


class _StraightThrough(torch.autograd.Function):
    """Rounds to quarters; its gradient is that of a clipped identity."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * (x.abs() < 1) * 0.5


@toy("custom_function")
class CustomFunction(nn.Module):
    """An `autograd.Function` whose backward is not the derivative of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(_StraightThrough.apply(self.enter(x)))
        return found


@toy("no_grad_block")
class NoGradBlock(nn.Module):
    """Part of forward runs under `no_grad`: what it makes is a constant to the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        with torch.no_grad():
            gate = torch.sigmoid(self.middle(h))
        found: Tensor = self.leave(gate * torch.tanh(self.middle(h)))
        return found


@toy("detach")
class Detach(nn.Module):
    """A branch whose input is detached, as the teacher's side of a self-supervised model is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        found: Tensor = self.leave(h + torch.tanh(self.middle(h.detach())))
        return found


@toy("tensor_hook", "no-graph")
class TensorHook(nn.Module):
    """A hook on an activation scales the gradient that passes there."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.1)
        found: Tensor = self.leave(h)
        return found


@toy("forward_hook")
def _forward_hook() -> nn.Module:
    """A forward hook replaces what a layer returned."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    model[2].register_forward_hook(lambda module, args, output: output * 0.5 + args[0])
    return model


@toy("autocast_inside")
class AutocastInside(nn.Module):
    """The middle runs in bfloat16 by a context of its own, and one layer in it opts out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.precise = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.middle(torch.tanh(h))
            with torch.autocast("cpu", enabled=False):
                h = self.precise(h.to(self.precise.weight.dtype))
        found: Tensor = self.leave(torch.tanh(h))
        return found


@toy("checkpoint", "draws")
class Checkpoint(nn.Module):
    """A block, with dropout in it, whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = checkpoint(self.block, h, use_reentrant=False)
        found: Tensor = self.leave(h)
        return found


@toy("mha_fastpath", "grad-mode", dense(5, 16))
class MHAFastPath(nn.Module):
    """`nn.MultiheadAttention`'s own Python takes a fused kernel in eval mode where nothing needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 4)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.enter(x)
        mixed, weights = self.attention(h, h, h)
        again, _ = self.attention(mixed, mixed, mixed, need_weights=False)
        return self.leave(again), weights


@toy("grad_mode_branch", "grad-mode")
class GradModeBranch(nn.Module):
    """Forward asks whether gradients are recorded, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = torch.tanh(h) if torch.is_grad_enabled() else torch.tanh(h) * 1.25
        found: Tensor = self.leave(h)
        return found


@toy("is_compiling_branch")
class IsCompilingBranch(nn.Module):
    """Forward asks whether it is compiled, exported or traced, and would then compute something else."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing():
            h = h * 2
        found: Tensor = self.leave(h)
        return found


@toy("bf16", "half", call(lambda batch, generator: torch.randn(batch, 8, generator=generator).bfloat16()))
def _bf16() -> nn.Module:
    """Parameters, inputs and outputs in bfloat16, with a norm that runs in float32 between."""

    class _Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x.float(), (16,)).to(x.dtype)

    return nn.Sequential(nn.Linear(8, 16), _Norm(), nn.GELU(), nn.Linear(16, 4)).bfloat16()


@toy("hourglass", "", dense(256))
def _hourglass() -> nn.Module:
    """Wide inside and narrow at its waist: an activation kept past its last use shows in the peak memory."""
    waist = nn.Sequential(nn.Linear(512, 4), nn.Tanh(), nn.Linear(4, 512))
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), waist, nn.Tanh(), nn.Linear(512, 256))


ENTRIES = tuple(toy.entries)
