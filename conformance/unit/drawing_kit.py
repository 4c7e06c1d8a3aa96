"""What tests of drawings share: a net to draw, and what stands in the boxes of its picture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.visualization.graph import Box, Graph, Group, Options, graph

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz here: there is no 'dot' on PATH")


class Block(nn.Module):
    """A residual block, whose activation is called twice."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + x)


class Net(nn.Module):
    """Two blocks, the first of them frozen, and a head that also takes a second input of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Block(frozen=True), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))) * scale


def prepared() -> SplitRuntime:
    torch.manual_seed(0)
    given = {"example_kwargs": {"scale": torch.randn(2, 2)}, "split": SplitSpec("after:blocks.0", trainable=True)}
    return prepare_split(Net().eval(), (torch.randn(2, 3, 8, 8),), **given)


class Deep(nn.Module):
    """Blocks of blocks, of which some are larger than others."""

    def __init__(self, blocks: int, layers: int) -> None:
        super().__init__()
        inner = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(blocks)]
        self.blocks = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def boxes(found: Graph) -> Iterator[Box]:
    for item in found.items:
        yield from [item] if isinstance(item, Box) else item.boxes()


def groups(items: Any) -> Iterator[Group]:
    for item in items:
        if isinstance(item, Group):
            yield item
            yield from groups(item.items)


def drawn(runtime: SplitRuntime, split: bool = False, **options: Any) -> Graph:
    return graph(runtime.plan, runtime.candidate if split else None, Options(**options))


def words(found: Graph) -> list[str]:
    return ["\n".join(box.rows) for box in boxes(found)]


__all__ = ["Block", "Deep", "Net", "boxes", "drawn", "groups", "needs_graphviz", "prepared", "words"]
