"""One scalar from any model output, so that every floating tensor in it has a gradient of its own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def loss(output: Any) -> Tensor:
    """A scalar that depends on every element of every floating tensor in `output`, on each in a different way.

    The k-th tensor counts sqrt(4k + 2) times, which is never rational, and its elements are weighted by the cosine of
    their position. A plain mean would not do: it is blind to a permutation, and constant over a normalised output
    (the mean over the batch of what BatchNorm returns is its bias), which leaves gradients of rounding noise.
    """
    leaves = enumerate(floating_leaves(output))
    terms = [math.sqrt(4 * k + 2) * (leaf * _ripple(leaf)).mean() for k, leaf in leaves]
    if not terms:
        raise ValueError(f"the output ({type(output).__name__}) holds no floating tensor to take a loss of")
    return torch.stack(terms).sum()


def floating_leaves(output: Any) -> Iterator[Tensor]:
    """The floating tensors of nested mappings, sequences and dataclasses, in order; TypeError for anything opaque."""
    match output:
        case Tensor():
            if output.is_floating_point():
                yield output
        case None | bool() | int() | float() | str():
            pass
        case Mapping():  # before the dataclasses: transformers' ModelOutput is both
            for value in output.values():
                yield from floating_leaves(value)
        case tuple() | list():
            for value in output:
                yield from floating_leaves(value)
        case _ if is_dataclass(output):
            for field in fields(output):
                yield from floating_leaves(getattr(output, field.name))
        case _:
            raise TypeError(f"cannot look for tensors in a {type(output).__name__}; teach model_zoo.losses about it")


def _ripple(leaf: Tensor) -> Tensor:
    # At least float32, and with it the product and the loss: in bfloat16 a mean loses what it should show.
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    return torch.arange(leaf.numel(), device=leaf.device, dtype=dtype).cos().view(leaf.shape)
