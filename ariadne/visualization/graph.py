"""The graph of a drawing: what is drawn of a plan, before any picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ariadne.cut import SplitCandidate, crosses, ends_of
from ariadne.plan import TracePlan, uses
from ariadne.units import size
from ariadne.visualization import labels
from ariadne.visualization.fit import fits
from ariadne.visualization.fold import Folding, Frame, fold, frames
from ariadne.visualization.parts import Box, Edge, Graph, Group, Options, Role
from ariadne.visualization.repeat import Repeat, Repeats, Run

TURNS = "{} alike, each fed by the one before it, drawn once"
MOST_CROSSING = 12  # values that get a box each; more are put together by where they come from


def graph(plan: TracePlan, candidate: SplitCandidate | None, options: Options) -> Graph:
    """What to draw of a plan; with a candidate, of the plan cut there.

    Every op is in exactly one box, and the ops of a box follow one another, so that arrows never run in a circle. Of blocks
    that repeat, `Graph.repeats`, only the first is drawn, with all arrows of the others save those from one to the next.
    """
    root = frames(plan)
    cut = candidate.cut if candidate else None
    depth = None if options.detail == "operation" and options.depth == "auto" else options.depth
    alike = Repeats(plan)

    def build(folding: Folding) -> Graph:
        return _Builder(plan, root, folding, options, candidate, alike).graph()

    return build(fold(root, depth, cut=cut, fits=lambda folding: fits(build(folding))))


class _Builder:
    """Makes the boxes of one graph, and numbers them."""

    def __init__(
        self,
        plan: TracePlan,
        root: Frame,
        folding: Folding,
        options: Options,
        candidate: SplitCandidate | None,
        alike: Repeats,
    ) -> None:
        self.plan, self.root, self.folding, self.options, self.candidate = plan, root, folding, options, candidate
        self.names = labels.inputs(plan)
        self.number = 0
        self.alike = alike
        self.repeats: list[Repeat] = []  # outermost first
        self.crossing: dict[str, str] = {}  # of each value that crosses, its box
        self.last_use = {name: i for i, node in enumerate(plan.nodes) for name in node.reads}
        self.last_use |= {name: len(plan.nodes) for name in uses(plan.output)}
        times: dict[str, int] = {}
        for call in plan.calls:
            times[call.path] = max(call.call, times.get(call.path, 0))
        self.often = {path for path, n in times.items() if n > 1}

    def graph(self) -> Graph:
        """All of it."""
        plan, root, candidate = self.plan, self.root, self.candidate
        sides: list[Box | Group] = []
        if candidate is None:
            sides = self.inside(root, 0, len(plan.nodes), "op")
        else:
            for role, start, end in (("prefix", 0, candidate.cut), ("suffix", candidate.cut, len(plan.nodes))):
                side: Role = "prefix" if role == "prefix" else "suffix"
                title = f"{role.upper()}: {labels.counted(end - start, 'op')}"
                sides.append(Group(role, side, title, tuple(self.inside(root, start, end, side))))
        inputs = [self.input(name) for _, name in plan.inputs]
        output = self.output()
        middle = self.boundary() if candidate else []
        items = (*inputs, *sides[:1], *middle, *sides[1:], output)
        edges = tuple(self.edges(items, output))
        title = root.call.kind or "model"
        return Graph(title, items, edges, tuple(self.legend(items)), candidate is not None, tuple(self.repeats))

    def inside(self, frame: Frame, start: int, end: int, role: Role) -> list[Box | Group]:
        """What is drawn of the part of an open frame that lies between two ops."""
        runs = list(frame.runs())
        whole = [run for run in runs if start <= _first(run) and _last(run) <= end]
        before = [run for run in runs if _first(run) < start < _last(run)]
        after = [run for run in runs if start <= _first(run) < end < _last(run)]
        items: list[Box | Group] = []
        for run in before:
            items += self.run(run, frame, start, min(_last(run), end), role)
        at = 0
        while at < len(whole):
            found = self.alike.find(whole, at) if self.options.fold_repeats else None
            if found is None:
                items += self.run(whole[at], frame, _first(whole[at]), _last(whole[at]), role)
                at += 1
                continue
            period, repeat = found
            items.append(self.repeat(whole[at : at + period * repeat.count], period, repeat, frame, role))
            at += period * repeat.count
        for run in after:
            items += self.run(run, frame, _first(run), end, role)
        return items

    def run(self, run: Run, frame: Frame, start: int, end: int, role: Role, many: str = "") -> list[Box | Group]:
        """What is drawn of a module call in an open frame, or of ops of its own, between two ops."""
        if isinstance(run, Frame):
            return [self.module(run, frame, start, end, role, many=many)]
        if self.options.detail == "operation" or self.folding.every_op:
            return [self.ops(frame, i, i + 1, role) for i in range(start, end)]
        return [self.ops(frame, start, end, role)]

    def repeat(self, runs: list[Run], period: int, repeat: Repeat, frame: Frame, role: Role) -> Box | Group:
        """The first turn of a repeat, which stands for all."""
        self.repeats.append(repeat)
        calls = [run.call for run in runs if isinstance(run, Frame)]
        first, last = calls[0], calls[-1]
        to = f"call {last.call}" if last.path == first.path else labels.local(last.path, frame.call.path)
        many = f" × {repeat.count}, to {to}"
        items = [
            i
            for run in runs[:period]
            for i in self.run(run, frame, _first(run), _last(run), role, many * (period == 1))
        ]
        if period == 1:
            return replace(items[0], count=repeat.count, tip=f"{items[0].tip}: {TURNS.format(repeat.count)}")
        names = [labels.local(run.call.path, frame.call.path) for run in runs[:period] if isinstance(run, Frame)]
        title = f"{labels.some(names, 2)}{many}"
        return Group(self._id(), role, title, tuple(items), TURNS.format(repeat.count), repeat.count)

    def module(
        self, frame: Frame, parent: Frame, start: int, end: int, role: Role, around: str = "", many: str = ""
    ) -> Box | Group:
        """A module call, or the part of it on one side: a group where it is open, else a box.

        `around`: the title of a module that has nothing but this one in it, and so no line of its own. `many`: how many like
        it there are.
        """
        call, whole = frame.call, end - start == frame.size
        which = f" (call {call.call})" if call.path in self.often else ""
        first, last = start - call.start + 1, end - call.start
        span = f"op {first}" if first == last else f"ops {first} to {last}"
        part = many if whole else f", {span} of {frame.size}"
        tip = f"{call.path} ({call.kind}){which}{'' if whole else part}"
        if self.options.detail == "operation" and frame.frames and not self.folding.is_open(frame):
            frame = Frame(call, frame.depth, ())  # its ops, without groups inside it
        if self.folding.is_open(frame) or (self.options.detail == "operation" and frame.size > 1):
            if len(frame.frames) == 1 and frame.frames[0].size == frame.size and frame.size > 1:
                around = around or f"{call.path} {call.kind}{which}"
                return self.module(frame.frames[0], frame, start, end, role, f"{around} > ", many)
            items = tuple(self.inside(frame, start, end, role))
            name = labels.local(call.path, parent.call.path) if around else call.path
            return Group(self._id(), role, f"{around}{name} {call.kind}{which}{part}", items, tip)
        title = f"{around}{labels.local(call.path, parent.call.path)} {call.kind}{which}{part}"
        if self.options.detail == "operation":
            title += f": {labels.op(self.plan.nodes[start])}"
        return self._box(
            title, call.path, start, end, role, total=bool(frame.frames), tip=tip, many=bool(many and whole)
        )

    def ops(self, frame: Frame, start: int, end: int, role: Role) -> Box:
        """Ops of an open frame's own, one after another."""
        nodes = self.plan.nodes[start:end]
        path, title = nodes[0].module, labels.ops(self.plan, nodes)
        if path != frame.call.path and len(nodes) == 1:
            title = f"{labels.local(path, frame.call.path)}: {title}"
        tip = f"in {path or 'the model itself'}"
        return self._box(title, frame.call.path, start, end, role, total=False, tip=tip)

    def _box(
        self, title: str, path: str, start: int, end: int, role: Role, *, total: bool, tip: str, many: bool = False
    ) -> Box:
        plan, options, nodes = self.plan, self.options, self.plan.nodes[start:end]
        results = [n for node in nodes for n in node.outputs if self.last_use.get(n, -1) >= end]
        results = results or list(nodes[-1].outputs)
        read = labels.parameters(plan, nodes, path, total)
        rows = [title, labels.result(plan, results), f"{read} each" if read and total and many else read]
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
                rows = [
                    f"boundary: {labels.ending(first)}",
                    *map(labels.ending, listed),
                    labels.result(plan, names),
                    f"made in {labels.ending(module)}",
                ]
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
        at = [ops[bisect_right(starts, self.drawn(i)) - 1] for i in range(len(plan.nodes))]
        found: dict[Edge, None] = {}

        def source(name: str) -> tuple[str, Role] | None:
            if name in plan.definitions:
                box = at[plan.definitions[name]]
                return box.id, box.role
            return (inputs[name], "prefix") if name in inputs else None

        def join(name: str, head: Box, late: bool, reader: int) -> None:
            tail = source(name)
            if name in plan.definitions and self.turns(plan.definitions[name], reader):
                return
            if tail is None or (not crosses(plan.values.get(name)) and name not in plan.definitions):
                return
            if late and tail[1] == "prefix" and name in self.crossing:
                found[Edge(tail[0], self.crossing[name], crossing=True)] = None
                found[Edge(self.crossing[name], head.id, crossing=True)] = None
            elif tail[0] != head.id:
                found[Edge(tail[0], head.id)] = None

        for i, node in enumerate(plan.nodes):
            for name in node.reads:
                join(name, at[i], at[i].role == "suffix", i)
        for name in dict.fromkeys(uses(plan.output)):
            join(name, output, self.candidate is not None, len(plan.nodes))
        yield from found
        if self.crossing:  # what needs nothing from before the cut is drawn after it all the same
            fed = {e.head for e in found}
            first = next(iter(self.crossing.values()))
            yield from (Edge(first, b.id, hidden=True) for b in ops if b.role == "suffix" and b.id not in fed)
            feeding = {e.tail for e in found}
            yield from (Edge(b.id, first, hidden=True) for b in ops if b.role == "prefix" and b.id not in feeding)

    def drawn(self, op: int) -> int:
        """The op that stands for an op: itself, or its like in the first turn of the repeats that it is in."""
        for repeat in self.repeats:  # a repeat inside of another comes after it, and is within its first turn
            op -= repeat.length * (repeat.turn(op) or 0)
        return op

    def turns(self, made: int, reader: int) -> bool:
        """Whether what one op makes for another goes from one turn of a repeat to the next."""
        for repeat in self.repeats:
            before, after = repeat.turn(made), repeat.turn(reader)
            if before is not None and after is not None and before != after:
                return True
            made, reader = made - repeat.length * (before or 0), reader - repeat.length * (after or 0)
        return False

    def legend(self, items: Iterable[Box | Group]) -> Iterator[str]:
        """What the drawing shows, and how it is to be read."""
        plan, c, ends = self.plan, self.candidate, ends_of(self.plan)
        boxes = sum(1 for i in items for b in ([i] if isinstance(i, Box) else i.boxes()) if b.end > b.start)
        state = [v for v in plan.values.values() if v.kind == "parameter"]
        numbers = sum(map(labels.elements, state))
        if c is not None:
            yield f"split: {c.split_id}{f' (after {c.after})' if c.after else ''}"
            yield f"boundary_bytes: {size(c.boundary_bytes)} per sample, {labels.counted(len(c.live), 'value')}"
            yield f"input: {size(ends.input_bytes)}, output: {size(ends.output_bytes)} per sample"
            yield f"prefix: {labels.counted(c.prefix_ops, 'op')}, suffix: {labels.counted(c.suffix_ops, 'op')}"
            yield f"suffix trainable: {'yes' if c.trainable else 'no'}, prefix trainable: {'yes' if c.trainable_prefix else 'no'}"
            if not c.safe:
                yield f"NOT SAFE: {c.reason}"
        yield f"{len(plan.nodes)} ops in {boxes} boxes, {labels.count(numbers) if numbers else 'no'} parameters"
        yield f"{plan.for_batches}, capture: {plan.captured_by}"
        yield "MB (1,000,000 bytes): what a box makes, per sample, or"
        yield "once per batch where no size follows the batch"
        if state:
            yield "params: (trainable), [frozen]"
        if self.repeats:
            yield "× 3: three alike, each fed by the one before; drawn once"

    def _id(self) -> str:
        self.number += 1
        return f"n{self.number}"


def _first(run: Run) -> int:
    return run.call.start if isinstance(run, Frame) else run[0]


def _last(run: Run) -> int:
    return run.call.end if isinstance(run, Frame) else run[1]
