"""Steps of torch's that are more than one op to a capture: results that grow, a functional `if`, and writes that no op shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LATER = 4  # above which the unseen happens: no capture of an example does it
_Base: Any = torch._C.TensorBase  # whose methods capture does not stand before


def grown(frame: Any, x: Tensor, how: str) -> Tensor:
    """Results that grow what they are written into."""
    h = x.detach()
    kept = torch.empty(0, dtype=x.dtype)
    if how == "product":
        torch.mul(h, h, out=kept)
    else:
        torch.add(h, 1, out=kept)
    if how == "twice" and kept.numel():
        torch.cat([kept, h], out=torch.empty(0, dtype=x.dtype))
    return x + kept


def functional_if(frame: Any, x: Tensor) -> Tensor:
    """One of two functions, by data."""
    found: Tensor = torch.cond(x.detach().sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (x,))
    return found


SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda h: nn.functional.layer_norm(h, h.shape[-1:]).sin(),
    "linear": lambda h: nn.functional.linear(h, torch.full((2, h.shape[-1]), 0.5, dtype=h.dtype)).tanh(),
    "silu": lambda h: nn.functional.silu(h),
    "softmax": lambda h: h.softmax(-1).square(),
}


def slope(frame: Any, x: Tensor, by: str) -> Tensor:
    """The gradient of what composite ops make of it, taken in forward, which reads what these keep to themselves."""
    with torch.enable_grad():
        h = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad(SLOPES[by](h).sum(), h, create_graph=True)
    return x + found


def _applied(x: Tensor) -> Tensor:
    t = x.detach().clone()
    _Base.apply_(t, lambda v: v * 2)
    return t


def _mapped(x: Tensor) -> Tensor:
    t = x.detach().clone()
    _Base.map_(t, t, lambda v, w: v * w)
    return t


def _set(x: Tensor) -> Tensor:
    t = x.detach().clone()
    _Base.data.__set__(t, t.data * 2)
    return t


def _seeded(x: Tensor) -> Tensor:
    return x.detach() * torch.rand(1, dtype=x.dtype, generator=torch.Generator().manual_seed(7))


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {"apply": _applied, "map": _mapped, "data": _set, "seeded": _seeded}


def unseen_later(frame: Any, x: Tensor, how: str) -> Tensor:
    """What no op shows, at larger batches than an example has."""
    return x + UNSEEN[how](x) if frame.batch > LATER else x * 2
