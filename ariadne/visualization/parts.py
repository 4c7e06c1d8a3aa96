"""The parts of a drawing: boxes in groups and arrows between them, as frozen data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ariadne.visualization.fold import Depth
from ariadne.visualization.repeat import Repeat

Role = Literal["op", "prefix", "suffix", "boundary", "passthrough", "input", "output"]
Detail = Literal["module", "operation"]


@dataclass(frozen=True, slots=True)
class Options:
    """What is shown; the names and defaults are those of `runtime.visualize`."""

    detail: Detail = "module"
    depth: Depth = "auto"
    targets: bool = False
    markers: bool = False
    indices: bool = False
    fold_repeats: bool = True


@dataclass(frozen=True, slots=True)
class Box:
    """Something that is drawn as one: the ops `start` to `end` (an input, an output or a crossing value has none).

    `count`: how many like it follow one another, of which it is the first.
    """

    id: str
    role: Role
    rows: tuple[str, ...]
    tip: str = ""
    start: int = 0
    end: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Boxes and groups with a line around them: a module that is drawn open, a side of the split, or a turn of a repeat."""

    id: str
    role: Role
    title: str
    items: tuple[Box | Group, ...]
    tip: str = ""
    count: int = 1

    def boxes(self) -> Iterator[Box]:
        """All boxes in it, at any depth."""
        for item in self.items:
            if isinstance(item, Box):
                yield item
            else:
                yield from item.boxes()


@dataclass(frozen=True, slots=True)
class Edge:
    """An arrow between two boxes; `crossing` where it meets the boundary, `hidden` where it only keeps an order."""

    tail: str
    head: str
    crossing: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """A drawing, not yet drawn."""

    title: str
    items: tuple[Box | Group, ...]
    edges: tuple[Edge, ...]
    legend: tuple[str, ...]
    split: bool
    repeats: tuple[Repeat, ...] = ()

    def boxes(self) -> Iterator[Box]:
        """All boxes, at any depth."""
        for item in self.items:
            yield from [item] if isinstance(item, Box) else item.boxes()
