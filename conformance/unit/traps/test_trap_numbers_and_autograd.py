"""Traps 19 and 20: numbers read out of tensors, and what autograd is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ariadne.errors import GuardError, WitnessError
from conformance.unit.trap_twins import Twins, either, seeded

# 19. Numbers read out of tensors


def read_item(s: torch.Tensor) -> float:
    return s.item()


WAYS_TO_READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": read_item,
    "arithmetic on it": lambda s: s.item() * 2 + 1,
    "float": lambda s: float(s.detach()),
    "int": lambda s: int(s * 10),
    "tolist": lambda s: s.reshape(1).tolist()[0],
    "numpy": lambda s: float(s.detach().numpy()),
    "unpacked": lambda s: float(next(iter(s.detach().reshape(1)))),
    "bool": lambda s: 3.0 if s > 1.0 else -3.0,
    "format": lambda s: float(f"{s.detach():.3f}"),
}


class Scaled(nn.Module):
    """Multiplies by a number that was read out of a buffer."""

    def __init__(self, read: Callable[[torch.Tensor], Any], kind: str = "buffer") -> None:
        super().__init__()
        self.read, self.kind, self.a, self.b = read, kind, nn.Linear(6, 6), nn.Linear(6, 6)
        if kind == "parameter":
            self.s = nn.Parameter(torch.tensor(0.7))
        elif kind == "buffer":
            self.register_buffer("s", torch.tensor(0.7))
        elif kind == "attribute":
            self.s = torch.tensor(0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        s = x.detach().abs().mean() if self.kind == "input" else self.s
        return torch.relu(self.b(x * self.read(s)))


@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute", "input"])
@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_a_number_read_out_of_a_tensor_is_the_one_of_the_call(way: str, kind: str) -> None:
    """The example's number is right; another one is followed, or its witness says that it changed."""
    twins = Twins(lambda: Scaled(WAYS_TO_READ[way], kind), seeded((2, 6)))
    for b in (2, 1, 3):
        either(lambda b=b: twins.replay(seeded((b, 6), 1)), GuardError, "capture")
    if kind != "input":
        twins.replay(seeded((2, 6)))
        for model in (twins.whole, twins.split):
            with torch.no_grad():
                model.s.fill_(1.3)
    either(lambda: twins.replay(seeded((2, 6), 9) * 30), GuardError, "capture")
    twins = Twins(lambda: Scaled(WAYS_TO_READ[way], kind), seeded((2, 6)))
    if kind != "input":
        for model in (twins.whole, twins.split):
            with torch.no_grad():
                model.s.fill_(1.3)
    either(lambda: twins.train(seeded((2, 6), 9) * 30, steps=1), GuardError, "capture")


def test_batch_norm_with_cumulative_averages_follows_or_refuses() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 2))

    twins = Twins(build, seeded((2, 6)), train=True)
    twins.train(seeded((3, 6)), steps=1, cuts=[twins.runtime])
    for _ in range(3):
        if (
            either(lambda: twins.train(seeded((3, 6)), steps=1, cuts=[twins.runtime]), WitnessError, "capture")
            == "refused"
        ):
            break
    Twins(build, seeded((2, 6)), train=False).hold(6)


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm, old": nn.utils.weight_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm, old": nn.utils.spectral_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_weights_that_forward_computes_and_writes(norm: str, train: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), NORMS[norm](nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2))

    Twins(build, seeded((2, 6)), train=train).hold(6, batches=(1, 3))


# 20. What autograd is told


class Doubled(torch.autograd.Function):
    """A backward that is not the derivative, so that it shows where it ran."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * 3 + x, None


class Pair(torch.autograd.Function):
    """Two results, one of which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        top = x.argmax(dim=1)
        ctx.mark_non_differentiable(top)
        return x * y, top

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> tuple[Any, Any]:
        x, y = ctx.saved_tensors
        return (g * y * 5 if ctx.needs_input_grad[0] else None), (g * x if ctx.needs_input_grad[1] else None)


class Later(torch.autograd.Function):
    """The newer way of writing one."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * (ctx.saved_tensors[0] > -1)


class InPlace(torch.autograd.Function):
    """Writes its argument and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 7


class Body(nn.Module):
    """Two layers around something."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Dropout(0.4)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.middle(self, self.a(x))))


def under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = m.b(x).abs().mean(dim=1, keepdim=True)
    return x * scale + m.b(x)


def under_enable_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = m.b(x)
        with torch.enable_grad():
            y = y + torch.sin(m.b(x))
    return x + y


def decorated(m: Any, x: torch.Tensor) -> torch.Tensor:
    @torch.no_grad()
    def quiet(t: torch.Tensor) -> torch.Tensor:
        return m.b(t) * 2

    return x + quiet(x) + m.b(x)


def written_under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x) * 1.5
    with torch.no_grad():
        y.mul_(0.5)
    return y + x


def in_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.b(x)
        with torch.autocast("cpu", enabled=False):
            z = m.b(x)
    return y.float() + z


def in_two_autocasts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The casts of the weight are cached within each block, and their gradients add up there."""
    with torch.autocast("cpu", torch.bfloat16):
        y = m.b(m.b(x)) + m.b(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = y + m.b(y)
    return y.float()


MIDDLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "Function": lambda m, x: Doubled.apply(m.b(x), 0.5) + x,
    "Function with two results": lambda m, x: Pair.apply(m.b(x), x)[0] + Pair.apply(x, x)[1][:, None],
    "Function, newer": lambda m, x: Later.apply(m.b(x)) * x,
    "Function that writes": lambda m, x: InPlace.apply(m.b(x)) + x,
    "Function of a parameter": lambda m, x: F.linear(x, Doubled.apply(m.b.weight, 2.0)),
    "no_grad": under_no_grad,
    "enable_grad in no_grad": under_enable_grad,
    "no_grad as a decorator": decorated,
    "a write under no_grad": written_under_no_grad,
    "detach": lambda m, x: m.b(x).detach() * x + m.b(x.detach()),
    "detach_": lambda m, x: m.b(x).detach_() * x,
    "requires_grad_": lambda m, x: m.b(x.detach().requires_grad_()) + x,
    "data": lambda m, x: m.b(x) * x.data,
    "autocast": in_autocast,
    "autocast, twice": in_two_autocasts,
    "checkpoint": lambda m, x: checkpoint(lambda t: m.drop(torch.relu(m.b(t))), x, use_reentrant=False) + x,
    "checkpoint, reentrant": lambda m, x: checkpoint(lambda t: m.drop(torch.relu(m.b(t))), x, use_reentrant=True) + x,
    "grad inside": lambda m, x: x + torch.autograd.grad(
        torch.tanh(y := x.detach().requires_grad_()).sum(), y)[0] if torch.is_grad_enabled() else x * 2,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*requires_grad=True.*:UserWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("middle", MIDDLES)
def test_what_forward_tells_autograd_is_kept(middle: str, train: bool) -> None:
    Twins(lambda: Body(MIDDLES[middle]), seeded((2, 6)), train=train).hold(6, batches=(1, 3))
