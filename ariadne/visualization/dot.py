"""DOT: a graph as text for the Graphviz program, the same bytes for the same graph."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ariadne.visualization.fit import FONT_SIZE, RANK_SEP
from ariadne.visualization.parts import Box, Edge, Graph, Group, Role

FONT = "Helvetica,Arial,sans-serif"
INK, QUIET = "#1f2328", "#57606a"
# What tells the roles apart, besides colour: the outline, its line, and the first word of the label.
BOXES: Mapping[Role, Mapping[str, str]] = {
    "op": {"shape": "box", "style": "filled,rounded", "fillcolor": "#ffffff", "color": "#57606a"},
    "prefix": {"shape": "box", "style": "filled,rounded", "fillcolor": "#ffffff", "color": "#0550ae"},
    "suffix": {"shape": "box", "style": "filled,dashed", "fillcolor": "#ffffff", "color": "#953800"},
    "boundary": {
        "shape": "hexagon",
        "style": "filled,bold",
        "fillcolor": "#fff8c5",
        "color": "#1f2328",
        "margin": "0,0.02",
    },
    "passthrough": {
        "shape": "parallelogram",
        "style": "filled,bold",
        "fillcolor": "#fff8c5",
        "color": "#1f2328",
        "margin": "0,0.02",
    },
    "input": {"shape": "ellipse", "style": "filled", "fillcolor": "#eaeef2", "color": "#57606a"},
    "output": {"shape": "ellipse", "style": "filled", "fillcolor": "#eaeef2", "color": "#57606a", "peripheries": "2"},
}
SIDES: Mapping[Role, Mapping[str, str]] = {
    "prefix": {"style": "filled,rounded", "fillcolor": "#e6f0fc", "color": "#0550ae", "penwidth": "2"},
    "suffix": {"style": "filled,dashed", "fillcolor": "#fdf0e4", "color": "#953800", "penwidth": "2"},
}
MODULES: Mapping[Role, Mapping[str, str]] = {
    "op": {"style": "filled,rounded", "fillcolor": "#f3f5f7", "color": "#afb8c1", "penwidth": "1"},
    "prefix": {"style": "filled,rounded", "fillcolor": "#d5e5f8", "color": "#6b9bd1", "penwidth": "1"},
    "suffix": {"style": "filled,dashed", "fillcolor": "#fae3cf", "color": "#bf8152", "penwidth": "1"},
}
KEY: Sequence[tuple[Role, tuple[str, ...]]] = (
    ("prefix", ("runs in the prefix", "(round corners, solid line)")),
    ("suffix", ("runs in the suffix", "(square corners, dashed line)")),
    ("boundary", ("boundary: made in the", "prefix, used in the suffix")),
    ("passthrough", ("passthrough: an input", "used in the suffix")),
)


def write(graph: Graph) -> str:
    """A graph as DOT text.

    >>> print(write(graph(plan, None, Options())))
    digraph ariadne {
    ...
    """
    return "\n".join(_lines(graph)) + "\n"


def quoted(text: str) -> str:
    """A text as a DOT string that shows exactly these characters; a control character shows as its code.

    >>> quoted('say "a\\\\b" & go')
    '"say \\\\"a\\\\\\\\b\\\\" &amp; go"'
    """
    plain = "".join(c if c == "\n" or unicodedata.category(c)[0] != "C" else f"<{ord(c):04x}>" for c in text)
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;").replace("\n", "\\n")
    return f'"{escaped}"'


def _attributes(given: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={quoted(value)}" for key, value in given.items())


def _left(rows: Iterable[str]) -> str:
    """Rows of a label, each of which starts at the left."""
    return "".join(f"{quoted(row)[1:-1]}\\l" for row in rows)


def _lines(graph: Graph) -> Iterator[str]:
    yield "digraph ariadne {"
    yield f"  graph [{_attributes({'rankdir': 'TB', 'fontname': FONT, 'fontsize': '10', 'fontcolor': INK, 'bgcolor': 'white'})},"
    yield f'    nodesep="0.2", ranksep="{RANK_SEP / 72:.3f}", compound="true", labeljust="l"];'
    node = {"fontname": FONT, "fontsize": f"{FONT_SIZE:g}", "fontcolor": INK, "margin": "0.1,0.04", "height": "0.2"}
    yield f"  node [{_attributes(node)}];"
    yield f"  edge [{_attributes({'color': QUIET, 'arrowsize': '0.6'})}];"
    yield from _legend(graph)
    for item in graph.items:
        yield from _item(item, 1)
    yield from map(_edge, graph.edges)
    yield "}"


def _item(item: Box | Group, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(item, Box):
        tip = {"tooltip": item.tip or item.rows[0]}
        yield f"{pad}{item.id} [label={quoted(chr(10).join(item.rows))}, {_attributes({**BOXES[item.role], **tip})}];"
        return
    if item.role == "boundary":  # a row without a frame: with one, Graphviz crosses the arrows that leave it
        yield f"{pad}boundary_title [label={quoted(item.title)}, shape=plaintext, fontsize=11, tooltip={quoted(item.tip)}];"
        for inner in item.items:
            yield from _item(inner, depth)
        yield f"{pad}{{ rank=same; {'; '.join(['boundary_title', *(b.id for b in item.boxes())])}; }}"
        return
    yield f"{pad}subgraph cluster_{item.id} {{"
    side = depth == 1 and item.role in SIDES
    yield f"{pad}  graph [{_attributes(SIDES[item.role] if side else MODULES[item.role])}];"
    if side:  # in a corner that arrows seldom reach: the prefix's title above, the suffix's below
        yield f'{pad}  label="{_left(item.title.split(": "))}"; fontsize=11; tooltip={quoted(item.tip or item.title)};'
        yield f'{pad}  labelloc="{"b" if item.role == "suffix" else "t"}";'
    else:
        yield f'{pad}  label={quoted(item.title)}; fontsize={FONT_SIZE:g}; labelloc="t"; tooltip={quoted(item.tip or item.title)};'
    for inner in item.items:
        yield from _item(inner, depth + 1)
    yield f"{pad}}}"


def _edge(edge: Edge) -> str:
    if edge.hidden:
        return f'  {edge.tail} -> {edge.head} [style="invis"];'
    look = ' [style="bold", color="#1f2328"]' if edge.crossing else ""
    return f"  {edge.tail} -> {edge.head}{look};"


def _legend(graph: Graph) -> Iterator[str]:
    yield "  subgraph cluster_legend {"
    yield f'    label={quoted(graph.title)}; fontsize=11; style="solid"; color="#afb8c1"; tooltip="legend";'
    yield f'    legend [label="{_left(graph.legend)}", shape="plaintext", tooltip="legend"];'
    if graph.split:
        for role, words in KEY:
            yield f"    key_{role} [label={quoted(chr(10).join(words))}, {_attributes({**BOXES[role], 'tooltip': role})}];"
        yield "    { rank=same; key_prefix; key_suffix; }"
        yield "    { rank=same; key_boundary; key_passthrough; }"
        yield '    legend -> {key_prefix key_suffix} [style="invis"];'
        yield '    key_prefix -> key_boundary [style="invis"]; key_suffix -> key_passthrough [style="invis"];'
    yield "  }"
