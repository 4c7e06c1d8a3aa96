"""Blocks that repeat are drawn once, and nothing of the others is lost; what is not alike is not folded."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec
from ariadne.cut import frontiers, parse_boundary, select
from ariadne.plan import TracePlan, uses
from ariadne.prepare import captured
from ariadne.visualization import export_trace_dot
from ariadne.visualization.graph import graph
from ariadne.visualization.parts import Box, Graph, Group, Options


class Block(nn.Module):
    """Norm, two layers, a residual, and a shift that all blocks share."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x) + shift).relu())


class Tower(nn.Module):
    """Six blocks in a loop; `taps`: those whose outputs forward returns as well."""

    def __init__(self, count: int = 6, taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(4, 8),
            nn.ModuleList(Block() for _ in range(count)),
            nn.Linear(8, 2),
        )
        self.taps = taps

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        x, kept = self.stem(x), []
        for i, block in enumerate(self.blocks):
            x = block(x, shift)
            if i in self.taps:
                kept.append(x)
        return [self.head(x), *kept]


class Pairs(Tower):
    """Blocks of two kinds by turns, with an op between them."""

    def __init__(self) -> None:
        super().__init__()
        for i in (1, 3, 5):
            self.blocks[i].down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, shift).tanh()
        return self.head(x)


class Tied(Tower):
    """One block, called six times."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        x = self.stem(x)
        for _ in range(6):
            x = self.blocks[0](x, shift)
        return self.head(x)


class Towers(nn.Module):
    """Towers of blocks: a repeat within a repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(*(Inner() for _ in range(3)), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.stages(x) * shift


class Inner(nn.Module):
    """A block of the towers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Reaching(Tower):
    """Each block also reads what the one before the last has made."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        older = x = self.stem(x)
        for block in self.blocks:
            older, x = x, block(x, older)
        return self.head(x)


class First(Tower):
    """All blocks read what the first has made."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        x = first = self.blocks[0](self.stem(x), shift)
        for block in self.blocks[1:]:
            x = block(x, first)
        return self.head(x)


@functools.cache
def plan_of(make: Callable[[], nn.Module]) -> TracePlan:
    return captured_plan(make())


def captured_plan(model: nn.Module) -> TracePlan:
    torch.manual_seed(0)
    width = 8 if isinstance(model, Towers) else 4
    args = (torch.randn(2, width),) if isinstance(model, nn.Sequential) else (torch.randn(2, width), torch.randn(2, 8))
    return captured(model.eval(), args, spec=SplitSpec("auto")).plan


def groups(items: Any) -> list[Group]:
    return [g for i in items if isinstance(i, Group) for g in [i, *groups(i.items)]]


def titles(found: Graph) -> list[str]:
    return [b.rows[0] for b in found.boxes()] + [g.title for g in groups(found.items)]


def folded(found: Graph) -> list[tuple[int, int]]:
    return [(r.length, r.count) for r in found.repeats]


def arrows(plan: TracePlan, found: Graph) -> set[tuple[int, int]]:
    """All uses of what ops make, as the boxes of a drawing have them, by its own account of repeats; computed from the plan."""
    boxes: dict[int, Box] = {i: b for b in found.boxes() for i in range(b.start, b.end)}

    def stands(op: int) -> int:
        for r in found.repeats:
            op = r.start + (op - r.start) % r.length if r.start <= op < r.end else op
        return op

    def between_turns(made: int, reader: int) -> bool:
        for r in found.repeats:
            if r.start <= made < r.end and r.start <= reader < r.end:
                if (made - r.start) // r.length != (reader - r.start) // r.length:
                    return True
                made, reader = r.start + (made - r.start) % r.length, r.start + (reader - r.start) % r.length
        return False

    uses_ = {
        (plan.definitions[name], i)
        for i, node in enumerate(plan.nodes)
        for name in node.reads
        if name in plan.definitions
    }
    uses_ |= {(plan.definitions[name], len(plan.nodes)) for name in uses(plan.output)}
    ends = {b.id: b for b in found.boxes()}
    (output,) = [b for b in found.boxes() if b.role == "output"]
    place = {b.id: n for n, b in enumerate(ends.values())}
    wanted = set()
    for made, reader in uses_:
        if not between_turns(made, reader):
            tail = boxes[stands(made)]
            head = output if reader == len(plan.nodes) else boxes[stands(reader)]
            wanted |= {(place[tail.id], place[head.id])} if tail is not head else set()
    drawn = {
        (place[e.tail], place[e.head]) for e in found.edges if not e.hidden and ends[e.tail].end > ends[e.tail].start
    }
    assert drawn == wanted
    return drawn


MODELS = {
    "blocks": (Tower, [(6, 6)]),
    "blocks that are tapped": (lambda: Tower(taps=(2,)), [(6, 3), (6, 3)]),
    "two kinds by turns": (Pairs, [(14, 3)]),
    "one block, called again": (Tied, [(6, 6)]),
    "repeats of repeats": (Towers, [(16, 4), (5, 3)]),
    "the one before the last is read": (Reaching, [(12, 2)]),
    "the first is read by all": (First, [(6, 4)]),
}


@pytest.fixture(scope="module", params=MODELS)
def drawn(request: pytest.FixtureRequest) -> tuple[TracePlan, list[tuple[int, int]]]:
    make, expected = MODELS[request.param]
    return plan_of(make), expected


def test_repeats_are_drawn_once_and_no_other_arrow_is_lost(drawn: tuple[TracePlan, list[tuple[int, int]]]) -> None:
    plan, expected = drawn
    for depth in ("auto", None, 1):
        found = graph(plan, None, Options(depth=depth))
        if depth is None:
            assert folded(found) == expected
        arrows(plan, found)
        whole = graph(plan, None, Options(depth=depth, fold_repeats=False))
        assert not whole.repeats
        arrows(plan, whole)
        assert {i for b in whole.boxes() for i in range(b.start, b.end)} == set(range(len(plan.nodes)))


def test_what_stands_for_others_says_for_how_many_and_up_to_which() -> None:
    plan = plan_of(Tower)
    assert "blocks.0 Block × 6, to blocks.5" in titles(graph(plan, None, Options()))
    closed = graph(plan, None, Options(depth=1))
    (box,) = [b for b in closed.boxes() if b.role == "op" and "Block" in b.rows[0]]
    assert box.count == 6
    assert box.rows[-1] == "params: 296 each"
    assert "blocks.0 Block (call 1) × 6, to call 6" in titles(graph(plan_of(Tied), None, Options()))
    assert "blocks.0, blocks.1 × 3, to blocks.5" in titles(graph(plan_of(Pairs), None, Options()))


@pytest.fixture(scope="module")
def tower() -> TracePlan:
    return plan_of(Tower)


@pytest.mark.parametrize(
    ("cut", "around"),
    [
        ("after:blocks.1", [(6, 2), (6, 4)]),
        ("after:blocks.3.up", [(6, 3), (6, 2)]),
        ("after:blocks.0.norm", [(6, 5)]),
        ("after:blocks.5", [(6, 6)]),
    ],
)
def test_the_block_that_holds_the_cut_is_drawn_by_itself(
    tower: TracePlan, cut: str, around: list[tuple[int, int]]
) -> None:
    c = select(tower, frontiers(tower), parse_boundary(cut))
    found = graph(tower, c, Options())
    assert folded(found) == around
    assert all(r.end <= c.cut or r.start >= c.cut for r in found.repeats)
    (sides,) = [[g for g in found.items if isinstance(g, Group) and g.id in ("prefix", "suffix")]]
    assert all(b.end <= c.cut for b in sides[0].boxes())
    assert all(b.start >= c.cut for b in sides[1].boxes())
    crossing = {b.tip for b in found.boxes() if b.role in ("boundary", "passthrough")}
    assert crossing == set(c.live)
    reached = {e.head for e in found.edges if not e.hidden}
    assert all(b.id in reached for b in found.boxes() if b.role in ("boundary", "passthrough"))


class Uneven(Tower):
    """Blocks of which one differs from the others in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        block, self.way = self.blocks[3], way
        if way == "a frozen weight":
            block.up.weight.requires_grad_(False)
        elif way == "another size":
            block.up, block.down = nn.Linear(8, 12), nn.Linear(12, 8)
        elif way == "another activation":
            block.forward = lambda x, shift: x + block.down(block.up(block.norm(x) + shift).tanh())
        elif way == "another number":
            block.norm.eps = 1e-3
        elif way == "no bias":
            block.down.bias = None
        elif way == "a tied weight":
            block.up.weight = self.blocks[2].up.weight
        elif way == "a module of another class":
            block.up.__class__ = type("MyLinear", (nn.Linear,), {})
        elif way == "another order of the residual":
            block.forward = lambda x, shift: block.down(block.up(block.norm(x) + shift).relu()) + x

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x, shift * 2 if i == 3 and self.way == "another input" else shift)
        return self.head(x)


WAYS = ("a frozen weight", "another number", "a tied weight", "another input")
SPELLINGS = (
    "another size",
    "another activation",
    "no bias",
    "a module of another class",
    "another order of the residual",
)


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(w, marks=pytest.mark.variants) for w in SPELLINGS)])
def test_a_block_that_differs_is_not_folded_with_the_others(way: str) -> None:
    plan = captured_plan(Uneven(way))
    found = graph(plan, None, Options(depth=None))
    odd = next(i for i, node in enumerate(plan.nodes) if node.module.startswith("blocks.3"))
    assert not any(r.start < odd < r.end for r in found.repeats), way
    assert any(r.count > 1 for r in found.repeats)
    arrows(plan, found)


@pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz here: there is no 'dot' on PATH")
@pytest.mark.parametrize("model", [Tower(12), nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)))])
def test_a_picture_is_at_most_two_screens_tall(model: nn.Module) -> None:
    text = export_trace_dot(captured_plan(model))
    svg = subprocess.run(
        ["dot", "-Tsvg"], input=text.encode(), capture_output=True, check=True, timeout=60
    ).stdout.decode()
    found = re.search(r'height="(\d+)pt"', svg)
    assert found
    assert int(found[1]) * 4 / 3 <= 2000
