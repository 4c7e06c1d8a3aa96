"""Small nets that hold what pipelines find hard, each with its inputs and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class SkipOverTwo(nn.Module):
    """Values of the first layer go over the next ones to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x).tanh()
        second = h = self.layers[1](first).tanh()
        for layer in self.layers[2:-1]:
            h = layer(h).tanh()
        return self.layers[-1](h + first) + second


class TiedEmbedding(nn.Module):
    """The first part reads a weight twice, the last one once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) + self.embed(tokens.flip(1))
        for layer in self.layers:
            h = layer(h).relu()
        return self.head(h)


class IntegersAndComplex(nn.Module):
    """Integers, booleans, complex numbers and a Python number cross."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h = self.layers[0](x)
        order, mask, wave = h.argsort(1), h > 0, torch.complex(h, 2 * h)
        size = x.shape[0] * 0.5
        for layer in self.layers[1:]:
            h = layer(h).tanh()
        wave = wave * torch.complex(h, h)
        return h.gather(1, order) * mask + wave.real * size * scale


class Normed(nn.Module):
    """BatchNorm in several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())])
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


class Dropped(nn.Module):
    """Dropout in several parts, and noise of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for i, layer in enumerate(self.layers):
            h = self.drop(layer(h).relu())
            if i == 3:
                h = h + 0.1 * torch.randn_like(h)
        return h


class FrozenMiddle(nn.Module):
    """A part in the middle trains nothing, and one has no parameters at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        for layer in self.layers[2:4]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 3:
                x = x.sin().cos().tanh().exp().sigmoid().tanh().abs().sqrt()
        return x


class FrozenStart(nn.Module):
    """Nothing trains before the last layers, so no gradient goes further back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        for layer in self.layers[:4]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Images(nn.Module):
    """Convolutions, so that layouts count, one of them at both ends; two branches of which no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1) for i in range(5)])
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)  # its gradient may have either stride where a dim is 1
        self.side, self.head = nn.Conv2d(4, 2, 1), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = x.contiguous(memory_format=torch.channels_last)
        for i, conv in enumerate(self.convs):
            h = conv(h).relu()
            if i != 2:
                h = h + self.depthwise(h)
            if i == 0:
                side = self.side(h)  # goes on to the output, and no loss uses it
        return {"logits": self.head(h.mean((2, 3))), "features": h.detach(), "side": side}


class AllAtOnce(nn.Module):
    """All that is hard in one net: each part has several of them, and each hop several kinds of values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])
        self.layers[3].requires_grad_(False)
        self.norms = nn.ModuleList([nn.BatchNorm1d(6) for _ in range(4)])
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = first = self.embed(tokens)
        order, wave = first.argsort(-1), torch.complex(first, 2 * first)
        for i, layer in enumerate(self.layers):
            h = self.drop(layer(h).tanh())
            if i % 2:
                h = self.norms[i // 2](h.transpose(1, 2)).transpose(1, 2)
            if i == 5:
                h = h.gather(-1, order) + F.linear(first, self.embed.weight[:6])  # the tied weight between its two ends
        return self.head(h + (wave * torch.complex(h, h)).real)


class TimeFirst(nn.Module):
    """The batch is dim 1; of the outputs one has it last, and one, a table, has as many rows as a micro-batch by accident."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layers = nn.LSTM(6, 6), nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.table = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.encoder(x)[0]
        for layer in self.layers:
            h = layer(h).tanh() * scale
        return {"h": h, "means": h.mean(0).t(), "table": self.table * 2}


@dataclass(frozen=True)
class Case:
    """A net, how inputs and targets of a batch are drawn, and a loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], tuple[Any, ...]]
    target: Callable[[int, torch.Generator], torch.Tensor]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)  # of prepare_pipeline


def _rows(n: int, g: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6, generator=g),)


def _row(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 6, generator=g)


def squared(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return F.mse_loss(out, target)


def _tokens(n: int, g: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randint(11, (n, 3), generator=g),)


def _next_tokens(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(11, (n, 3), generator=g)


def _entropy(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


CASES = {
    "skip": Case(SkipOverTwo, _rows, _row, squared),
    "tied": Case(TiedEmbedding, _tokens, _next_tokens, _entropy),
    "integers": Case(IntegersAndComplex, lambda n, g: (*_rows(n, g), 0.5), _row, squared),
    "norm": Case(Normed, _rows, _row, squared),
    "dropout": Case(Dropped, _rows, _row, squared),
    "frozen_middle": Case(FrozenMiddle, _rows, _row, squared),
    "frozen_start": Case(FrozenStart, _rows, _row, squared),
    "images": Case(
        Images,
        lambda n, g: (torch.randn(n, 3, 8, 8, generator=g),),
        lambda n, g: torch.randint(5, (n,), generator=g),
        lambda out, target: F.cross_entropy(out["logits"], target),
    ),
    "time_first": Case(
        TimeFirst,
        lambda n, g: (torch.randn(4, n, 6, generator=g), torch.rand(6, generator=g)),
        _row,
        lambda out, target: squared(out["means"].t(), target) + out["table"].square().mean(),
        {"batch_dim": {"x": 1, "scale": None}},
    ),
    "noisy_loss": Case(Dropped, _rows, _row, lambda out, target: squared(F.dropout(out, 0.3), target)),
    "all": Case(AllAtOnce, _tokens, _next_tokens, _entropy),
}
