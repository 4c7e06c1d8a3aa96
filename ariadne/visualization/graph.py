"""The graph of a drawing: boxes in groups and arrows between them, as frozen data, before any picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ariadne.cut import SplitCandidate, crosses
from ariadne.plan import TracePlan, uses
from ariadne.units import size
from ariadne.visualization import labels
from ariadne.visualization.fold import Depth, Folding, Frame, fold, frames

Role = Literal["op", "prefix", "suffix", "boundary", "passthrough", "input", "output"]
Detail = Literal["module", "operation"]
MOST_CROSSING = 12  # values that get a box each; more are put together by where they come from


@dataclass(frozen=True, slots=True)
class Options:
    """What is shown; the names and defaults are those of `runtime.visualize`."""

    detail: Detail = "module"
    depth: Depth = "auto"
    targets: bool = False
    markers: bool = False
    indices: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """Something that is drawn as one: the ops `start` to `end` (an input, an output or a crossing value has none)."""

    id: str
    role: Role
    rows: tuple[str, ...]
    tip: str = ""
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Boxes and groups with a line around them: a module that is drawn open, or a side of the split."""

    id: str
    role: Role
    title: str
    items: tuple[Box | Group, ...]
    tip: str = ""

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


def graph(plan: TracePlan, candidate: SplitCandidate | None, options: Options) -> Graph:
    """What to draw of a plan; with a candidate, of the plan cut there.

    Every op is in exactly one box, and the ops of a box follow one another, so that arrows never run in a circle.
    """
    root = frames(plan)
    cut = candidate.cut if candidate else None
    depth = None if options.detail == "operation" and options.depth == "auto" else options.depth
    folding = fold(root, depth, cut=cut)
    builder = _Builder(plan, root, folding, options, candidate)
    sides: list[Box | Group] = []
    if candidate is None:
        sides = builder.inside(root, 0, len(plan.nodes), "op")
    else:
        for role, start, end in (("prefix", 0, candidate.cut), ("suffix", candidate.cut, len(plan.nodes))):
            side: Role = "prefix" if role == "prefix" else "suffix"
            title = f"{role.upper()}: {labels.counted(end - start, 'op')}"
            sides.append(Group(role, side, title, tuple(builder.inside(root, start, end, side))))
    inputs = [builder.input(name) for _, name in plan.inputs]
    output = builder.output()
    middle = builder.boundary() if candidate else []
    items = [*inputs, *sides[:1], *middle, *sides[1:], output]
    edges = tuple(builder.edges(items, output))
    title = root.call.kind or "model"
    return Graph(title, tuple(items), edges, tuple(builder.legend(items)), candidate is not None)


class _Builder:
    """Makes the boxes of one graph, and numbers them."""

    def __init__(
        self, plan: TracePlan, root: Frame, folding: Folding, options: Options, candidate: SplitCandidate | None
    ) -> None:
        self.plan, self.root, self.folding, self.options, self.candidate = plan, root, folding, options, candidate
        self.names = labels.inputs(plan)
        self.number = 0
        self.crossing: dict[str, str] = {}  # of each value that crosses, its box
        self.last_use = {name: i for i, node in enumerate(plan.nodes) for name in node.reads}
        self.last_use |= {name: len(plan.nodes) for name in uses(plan.output)}
        times: dict[str, int] = {}
        for call in plan.calls:
            times[call.path] = max(call.call, times.get(call.path, 0))
        self.often = {path for path, n in times.items() if n > 1}

    def inside(self, frame: Frame, start: int, end: int, role: Role) -> list[Box | Group]:
        """What is drawn of the part of an open frame that lies between two ops."""
        items: list[Box | Group] = []
        for run in frame.runs():
            if isinstance(run, Frame):
                lo, hi = max(run.call.start, start), min(run.call.end, end)
                if lo < hi:
                    items.append(self.module(run, frame, lo, hi, role))
                continue
            lo, hi = max(run[0], start), min(run[1], end)
            if self.options.detail == "operation" or self.folding.every_op:
                items += [self.ops(frame, i, i + 1, role) for i in range(lo, hi)]
            elif lo < hi:
                items.append(self.ops(frame, lo, hi, role))
        return items

    def module(self, frame: Frame, parent: Frame, start: int, end: int, role: Role, around: str = "") -> Box | Group:
        """A module call, or the part of it on one side: a group where it is open, else a box.

        `around`: the title of a module that has nothing but this one in it, and so no line of its own.
        """
        call, whole = frame.call, end - start == frame.size
        which = f" (call {call.call})" if call.path in self.often else ""
        first, last = start - call.start + 1, end - call.start
        span = f"op {first}" if first == last else f"ops {first} to {last}"
        part = "" if whole else f", {span} of {frame.size}"
        tip = f"{call.path} ({call.kind}){which}{part}"
        if self.options.detail == "operation" and frame.frames and not self.folding.is_open(frame):
            frame = Frame(call, frame.depth, ())  # its ops, without groups inside it
        if self.folding.is_open(frame) or (self.options.detail == "operation" and frame.size > 1):
            if len(frame.frames) == 1 and frame.frames[0].size == frame.size and frame.size > 1:
                around = around or f"{call.path} {call.kind}{which}"
                return self.module(frame.frames[0], frame, start, end, role, f"{around} > ")
            items = tuple(self.inside(frame, start, end, role))
            name = labels.local(call.path, parent.call.path) if around else call.path
            return Group(self._id(), role, f"{around}{name} {call.kind}{which}{part}", items, tip)
        title = f"{around}{labels.local(call.path, parent.call.path)} {call.kind}{which}{part}"
        if self.options.detail == "operation":
            title += f": {labels.op(self.plan.nodes[start])}"
        return self._box(title, call.path, start, end, role, total=bool(frame.frames), tip=tip)

    def ops(self, frame: Frame, start: int, end: int, role: Role) -> Box:
        """Ops of an open frame's own, one after another."""
        nodes = self.plan.nodes[start:end]
        path, title = nodes[0].module, labels.ops(self.plan, nodes)
        if path != frame.call.path and len(nodes) == 1:
            title = f"{labels.local(path, frame.call.path)}: {title}"
        tip = f"in {path or 'the model itself'}"
        return self._box(title, frame.call.path, start, end, role, total=False, tip=tip)

    def _box(self, title: str, path: str, start: int, end: int, role: Role, *, total: bool, tip: str) -> Box:
        plan, options, nodes = self.plan, self.options, self.plan.nodes[start:end]
        results = [n for node in nodes for n in node.outputs if self.last_use.get(n, -1) >= end]
        results = results or list(nodes[-1].outputs)
        rows = [title, labels.result(plan, results), labels.parameters(plan, nodes, path, total)]
        if options.targets:
            rows.append(labels.targets(nodes))
        if options.markers:
            rows += [labels.buffers(plan, nodes, path), *labels.markers(plan, nodes, results)]
        if options.indices:
            rows.append(f"op {start}" if end - start == 1 else f"ops {start} to {end - 1}")
        return Box(self._id(), role, tuple(filter(None, rows)), tip, start, end)

    def input(self, name: str) -> Box:
        """A tensor that forward takes."""
        return Box(
            f"input_{self._id()}", "input", (f"input {self.names[name]}", labels.result(self.plan, [name])), name
        )

    def output(self) -> Box:
        """What forward returns."""
        found = list(dict.fromkeys(uses(self.plan.output)))
        return Box("output", "output", tuple(filter(None, ("output", labels.result(self.plan, found)))))

    def boundary(self) -> list[Box | Group]:
        """A row of the values that cross, between the two sides."""
        assert self.candidate is not None
        plan, live = self.plan, self.candidate.live
        together: dict[tuple[str, str], list[str]] = {}
        for name in live:
            made = plan.definitions.get(name, -1)
            module = plan.nodes[made].module if made >= 0 else ""
            key = (module, "" if len(live) > MOST_CROSSING else name)
            together.setdefault(("input", name) if made < 0 else key, []).append(name)
        boxes = []
        for names in together.values():
            made = plan.definitions.get(names[0], -1)
            box_id = self._id()
            self.crossing |= dict.fromkeys(names, box_id)
            if made < 0:
                role: Role = "passthrough"
                rows = [f"passthrough: input {self.names.get(names[0], names[0])}", labels.result(plan, names)]
            else:
                role, module = "boundary", plan.nodes[made].module or "the model itself"
                listed = labels.some(names).split(", ") if len(names) > 1 else []
                first = labels.counted(len(names), "value") if listed else names[0]
                rows = [f"boundary: {first}", *listed, labels.result(plan, names), f"made in {module}"]
            if self.options.markers:
                rows += labels.markers(plan, (), names)
            boxes.append(Box(box_id, role, tuple(filter(None, rows)), ", ".join(names)))
        sent = f"{size(self.candidate.boundary_bytes)}\nper sample"
        title = f"BOUNDARY\n{self.candidate.split_id}\n{labels.counted(len(live), 'value')}\n{sent}"
        return [Group("boundary", "boundary", title, tuple(boxes), ", ".join(live))]

    def edges(self, items: Iterable[Box | Group], output: Box) -> Iterator[Edge]:
        """An arrow from each box to each that uses what it makes; across the cut, by way of the value that crosses."""
        plan = self.plan
        boxes = [b for i in items for b in ([i] if isinstance(i, Box) else i.boxes())]
        ops = [b for b in boxes if b.end > b.start]
        starts = [b.start for b in ops]
        inputs = dict(zip((n for _, n in plan.inputs), (b.id for b in boxes if b.role == "input"), strict=True))
        at = [ops[bisect_right(starts, i) - 1] for i in range(len(plan.nodes))]
        found: dict[Edge, None] = {}

        def source(name: str) -> tuple[str, Role] | None:
            if name in plan.definitions:
                box = at[plan.definitions[name]]
                return box.id, box.role
            return (inputs[name], "prefix") if name in inputs else None

        def join(name: str, head: Box, late: bool) -> None:
            tail = source(name)
            if tail is None or (not crosses(plan.values.get(name)) and name not in plan.definitions):
                return
            if late and tail[1] == "prefix" and name in self.crossing:
                found[Edge(tail[0], self.crossing[name], crossing=True)] = None
                found[Edge(self.crossing[name], head.id, crossing=True)] = None
            elif tail[0] != head.id:
                found[Edge(tail[0], head.id)] = None

        for i, node in enumerate(plan.nodes):
            for name in node.reads:
                join(name, at[i], at[i].role == "suffix")
        for name in dict.fromkeys(uses(plan.output)):
            join(name, output, self.candidate is not None)
        yield from found
        if self.crossing:  # what needs nothing from before the cut is drawn after it all the same
            fed = {e.head for e in found}
            first = next(iter(self.crossing.values()))
            yield from (Edge(first, b.id, hidden=True) for b in ops if b.role == "suffix" and b.id not in fed)
            feeding = {e.tail for e in found}
            yield from (Edge(b.id, first, hidden=True) for b in ops if b.role == "prefix" and b.id not in feeding)

    def legend(self, items: Iterable[Box | Group]) -> Iterator[str]:
        """What the drawing shows, and how it is to be read."""
        plan, c = self.plan, self.candidate
        boxes = sum(1 for i in items for b in ([i] if isinstance(i, Box) else i.boxes()) if b.end > b.start)
        state = [v for v in plan.values.values() if v.kind == "parameter"]
        numbers = sum(map(labels.elements, state))
        if c is not None:
            yield f"split: {c.split_id}{f' (after {c.after})' if c.after else ''}"
            yield f"boundary_bytes: {c.boundary_bytes:,.0f} per sample, {labels.counted(len(c.live), 'value')}"
            yield f"prefix: {labels.counted(c.prefix_ops, 'op')}, suffix: {labels.counted(c.suffix_ops, 'op')}"
            yield f"suffix trainable: {'yes' if c.trainable else 'no'}, prefix trainable: {'yes' if c.trainable_prefix else 'no'}"
            if not c.safe:
                yield f"NOT SAFE: {c.reason}"
        yield f"{len(plan.nodes)} ops in {boxes} boxes, {labels.count(numbers) if numbers else 'no'} parameters"
        yield f"batch {plan.batch_symbol} in {plan.batches}, capture: {plan.captured_by}"
        yield "MB (1,000,000 bytes): what a box makes, per sample, or"
        yield "once per batch where no size follows the batch"
        if state:
            yield "params: (trainable), [frozen]"

    def _id(self) -> str:
        self.number += 1
        return f"n{self.number}"
