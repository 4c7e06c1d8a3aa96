"""Copies of tensors that keep their strides: `clone()` lays out anew what has gaps or repeats."""

from __future__ import annotations

import torch


def own(t: torch.Tensor) -> torch.Tensor:
    """A differentiable copy of `t` with memory of its own and the same strides.

    >>> own(torch.zeros(3, 6)[:, ::2]).stride()
    (6, 2)
    """
    copy = t.clone()
    if t.layout is not torch.strided or copy.stride() == t.stride():
        return copy
    narrow = [0 if s == 0 and n > 1 else slice(None) for n, s in zip(t.shape, t.stride(), strict=True)]
    if 0 in narrow:
        kept = t[tuple(slice(0, 1) if k == 0 else k for k in narrow)]
        return own(kept).expand(t.shape)
    return t.new_empty_strided(t.shape, t.stride()).copy_(t)
