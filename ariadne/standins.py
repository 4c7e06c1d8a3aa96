"""Stand-ins: quick ops that say the same of a fake result as slow ones, which run as long Python decompositions on fake tensors.

A fake tensor has a shape, a layout, a dtype and a place in the autograd graph, and no numbers. Of these, an op that works
element by element gives what `neg` gives; so does batch norm, where its numbers of channels are known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_NEG, _NEG_ = _aten.neg.default, _aten.neg_.default
_BY_ELEMENT = "elu gelu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu softplus"
_QUICK: dict[OpOverload, OpOverload] = {getattr(_aten, name).default: _NEG for name in _BY_ELEMENT.split()}
_QUICK |= {getattr(_aten, f"{n}_").default: _NEG_ for n in _BY_ELEMENT.split() if hasattr(_aten, f"{n}_")}


def stand_in(func: OpOverload, args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
    """An op and arguments that give the fake result which these would, sooner; or these.

    Under autocast, or on dtypes that an op may refuse or promote, there is none.
    """
    if not args or not isinstance(args[0], FakeTensor) or torch._C._is_any_autocast_enabled():
        return func, args
    x = args[0]
    if x.dtype is not torch.float32:
        return func, args
    if func is _aten.batch_norm.default:
        return (_NEG, (x,)) if _is_plain_norm(x, args[1:5]) else (func, args)
    return (_QUICK[func], (x,)) if func in _QUICK else (func, args)


def _is_plain_norm(x: torch.Tensor, of_channels: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether a batch norm's weight, bias and statistics are of its dtype and channels, and it is in the graph by its input."""
    kept = [t for t in of_channels if t is not None]
    channels = x.shape[1]
    fit = type(channels) is int and all(type(n) is int for t in kept for n in t.shape)
    if not fit or any(t.dtype is not x.dtype or t.shape != (channels,) for t in kept):
        return False
    return x.requires_grad or not torch.is_grad_enabled() or not any(t.requires_grad for t in kept)
