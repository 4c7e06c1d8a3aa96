"""Seeded inputs: a sampler takes a batch size and a generator, and returns (args, kwargs)."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Sampler: TypeAlias = Callable[[int, Generator], Inputs]


def dense(*shape: int, count: int = 1) -> Sampler:
    """`count` positional float tensors of (batch, *shape), about standard normal.

    Each row and channel has its own mean: white noise alone looks the same to a network that pools over space,
    and rows could then be swapped unseen.
    """

    def draw(batch: int, generator: Generator) -> Tensor:
        mean = torch.randn(batch, shape[0], *(1 for _ in shape[1:]), generator=generator)
        return torch.randn(batch, *shape, generator=generator) + mean

    return lambda batch, generator: (tuple(draw(batch, generator) for _ in range(count)), {})


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
