"""One scalar from any model output, so that every floating tensor in it has a gradient of its own."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from model_zoo.values import leaves


def loss(output: Any) -> Tensor:
    """A scalar that depends on every element of every floating tensor in `output`, on each in a different way.

    The k-th tensor counts sqrt(4k + 2) times, which is never rational, and its elements are weighted by the cosine of
    their position. A plain mean would not do: it is blind to a permutation, and constant over a normalised output
    (the mean over the batch of what BatchNorm returns is its bias), which leaves gradients of rounding noise.
    """
    terms = [
        math.sqrt(4 * k + 2) * (leaf * _ripple(leaf)).mean()
        for k, leaf in enumerate(floating_leaves(output))
        if leaf.numel()  # the mean of nothing is nan
    ]
    if not terms:
        raise ValueError(f"the output ({type(output).__name__}) holds no floating tensor to take a loss of")
    return torch.stack(terms).sum()


def floating_leaves(output: Any) -> Iterator[Tensor]:
    """The floating tensors of nested mappings, sequences and dataclasses, in order; TypeError for anything opaque."""
    for _, leaf in leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def _ripple(leaf: Tensor) -> Tensor:
    # At least float32, and with it the product and the loss: in bfloat16 a mean loses what it should show.
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    return torch.arange(leaf.numel(), device=leaf.device, dtype=dtype).cos().view(leaf.shape)
