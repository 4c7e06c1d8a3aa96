"""Seeded inputs: a sampler takes a batch size and a generator, and returns (args, kwargs).

A sampler is made of draws, one for each input: a draw takes the same two and returns the input itself.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Sampler: TypeAlias = Callable[[int, Generator], Inputs]
Draw: TypeAlias = Callable[[int, Generator], Any]


def call(*args: Draw, **kwargs: Draw) -> Sampler:
    """The sampler that draws each positional and each keyword input, in this order."""

    def sample(batch: int, generator: Generator) -> Inputs:
        drawn = tuple(draw(batch, generator) for draw in args)
        return drawn, {name: draw(batch, generator) for name, draw in kwargs.items()}

    return sample


def floats(*shape: int) -> Draw:
    """A float tensor of (batch, *shape), about standard normal.

    Each row and channel has its own mean: white noise alone looks the same to a network that pools over space,
    and rows could then be swapped unseen.
    """

    def draw(batch: int, generator: Generator) -> Tensor:
        mean = torch.randn(batch, *shape[:1], *(1 for _ in shape[1:]), generator=generator)
        return torch.randn(batch, *shape, generator=generator) + mean

    return draw


def integers(low: int, high: int, *shape: int) -> Draw:
    """An int64 tensor of (batch, *shape), uniform from `low` to below `high`."""
    return lambda batch, generator: torch.randint(low, high, (batch, *shape), generator=generator)


def same(value: Any) -> Draw:
    """A value that is no tensor, the same at every call."""
    return lambda batch, generator: value


def dense(*shape: int, count: int = 1) -> Sampler:
    """`count` positional float tensors of (batch, *shape), as `floats` draws them."""
    return call(*(floats(*shape) for _ in range(count)))


def tokens(length: int, vocabulary: int, decoder_length: int | None = None) -> Sampler:
    """Keyword `input_ids` and `attention_mask` of (batch, length), and `decoder_input_ids` where a length is given.

    Every row is padded on the right, by at least one token: a mask of ones is dropped by transformers, and no row
    is then masked at all.
    """

    def draw(batch: int, generator: Generator) -> Inputs:
        filled = torch.randint(length // 2, length, (batch, 1), generator=generator)
        kwargs = {
            "input_ids": torch.randint(1, vocabulary, (batch, length), generator=generator),
            "attention_mask": (torch.arange(length) < filled).long(),
        }
        if decoder_length is not None:
            kwargs["decoder_input_ids"] = torch.randint(1, vocabulary, (batch, decoder_length), generator=generator)
        return (), kwargs

    return draw
