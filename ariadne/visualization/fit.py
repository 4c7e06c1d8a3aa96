"""How tall a drawing will be, told before Graphviz lays it out: its longest way from top to bottom."""

from __future__ import annotations

from collections.abc import Iterable

from ariadne.visualization.parts import Box, Graph, Group

FONT_SIZE, LINE = 9.0, 10.8  # of a box, in points: 12 pixels in a browser at 100 %
BOX_MARGIN, RANK_SEP = 5.8, 10.0
ROUND = 16.0  # by how much an ellipse, a hexagon or a slanted box is taller
GROUP_TITLE, GROUP_MARGIN = 20.0, 8.0  # above and below what is in a group
SIDES = (("prefix",), ("suffix",), ("boundary",))
EDGES = 16.0  # of the picture
MOST_HEIGHT = 1430.0  # 1,900 pixels, so that what is drawn has 2,000 at most: two screens
MOST_BOXES = 180


def fits(graph: Graph) -> bool:
    """Whether the picture of a graph can be read on two screens."""
    return sum(1 for _ in graph.boxes()) <= MOST_BOXES and height(graph) <= MOST_HEIGHT


def height(graph: Graph) -> float:
    """About how tall the picture of a graph is, in points (4/3 pixels each)."""
    around: dict[str, tuple[str, ...]] = {}
    rows: dict[str, Box] = {}
    _place(graph.items, (), around, rows)
    above: dict[str, list[str]] = {}
    for edge in graph.edges:
        above.setdefault(edge.head, []).append(edge.tail)
    bottom: dict[str, float] = {}
    for name, box in rows.items():  # each stands after all that it reads
        top = 0.0
        for tail in above.get(name, ()):
            entered = sum(g not in around[tail] for g in around[name])
            left = sum(g not in around[name] for g in around[tail])
            entered += (
                around[name][:1] in SIDES and around[tail][:1] != around[name][:1]
            )  # the frame of a side has a title of two lines
            top = max(top, bottom[tail] + RANK_SEP + entered * GROUP_TITLE + left * GROUP_MARGIN)
        bottom[name] = top + len(box.rows) * LINE + BOX_MARGIN + ROUND * (box.role not in ("op", "prefix", "suffix"))
    return max(bottom.values(), default=0.0) + EDGES


def _place(
    items: Iterable[Box | Group], groups: tuple[str, ...], around: dict[str, tuple[str, ...]], rows: dict[str, Box]
) -> None:
    for item in items:
        if isinstance(item, Box):
            around[item.id], rows[item.id] = groups, item
        else:
            _place(item.items, (*groups, item.id), around, rows)
