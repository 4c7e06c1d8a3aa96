"""Folding: the ops of a plan as nested module calls, and which of those are drawn open, closed, or op by op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ariadne.plan import ModuleCall, TracePlan

Depth = int | None | Literal["auto"]
MOST_BOXES = 180  # what "auto" opens modules up to: a ResNet-50 op by op has 171
SMALL_MODULE = (
    3  # ops; "auto" keeps such a module closed, where it says more than its parts: a convolution with its norm
)
SMALL_PLAN = 60  # ops; up to here none are drawn as one


@dataclass(frozen=True, slots=True)
class Frame:
    """One module call, with the calls inside it; ops of its own are those that no frame inside it has.

    `depth`: how many frames are around it; that of the model itself is 0.
    """

    call: ModuleCall
    depth: int
    frames: tuple[Frame, ...]

    @property
    def size(self) -> int:
        """How many ops it has, those of the frames inside it included."""
        return self.call.end - self.call.start

    def inside(self) -> Iterator[Frame]:
        """This frame and all inside it, outermost first."""
        yield self
        for frame in self.frames:
            yield from frame.inside()

    def runs(self) -> Iterator[Frame | tuple[int, int]]:
        """Its frames, and the runs of ops of its own between them, as (start, end)."""
        at = self.call.start
        for frame in self.frames:
            if frame.call.start > at:
                yield at, frame.call.start
            yield frame
            at = frame.call.end
        if at < self.call.end:
            yield at, self.call.end


def frames(plan: TracePlan) -> Frame:
    """The module calls of a plan as they were nested when forward ran, those without ops left out.

    A module that is used from several places is where it was called, not where it is kept.
    """
    whole = ModuleCall("", 1, 0, len(plan.nodes), "")
    calls = [c for c in plan.calls if c.end > c.start]
    if calls and not calls[0].path and calls[0].end - calls[0].start == len(plan.nodes):
        whole, *calls = calls
    children: list[list[int]] = [[] for _ in range(len(calls) + 1)]  # the last: of the model itself
    open_: list[int] = []
    for i, call in enumerate(calls):  # in the order in which they were entered
        while open_ and calls[open_[-1]].end < call.end:
            open_.pop()
        children[open_[-1] if open_ else -1].append(i)
        open_.append(i)

    def frame(call: ModuleCall, inner: list[int], depth: int) -> Frame:
        return Frame(call, depth, tuple(frame(calls[i], children[i], depth + 1) for i in inner))

    return frame(whole, children[-1], 0)


@dataclass(frozen=True, slots=True)
class Folding:
    """Which frames are open (by their calls), and whether runs of a frame's own ops are drawn op by op."""

    opened: frozenset[ModuleCall]
    every_op: bool

    def is_open(self, frame: Frame) -> bool:
        """Whether a frame is drawn as a group of what is inside it; else as one box."""
        return frame.call in self.opened


def fold(root: Frame, depth: Depth, *, cut: int | None = None, boxes: int = MOST_BOXES) -> Folding:
    """What is drawn open where modules deeper than `depth` are to be closed; None opens all.

    "auto" opens, from the largest, all modules of one kind and depth together, as long as no more than some `boxes` are
    drawn, so that modules of one size are open or closed throughout; and in any case those that `cut` falls into.
    """
    every_op = root.size <= SMALL_PLAN
    with_parts = [f for f in root.inside() if f.frames or f is root]
    if depth != "auto":
        return Folding(frozenset(f.call for f in with_parts if depth is None or f.depth < depth), every_op)

    def drawn(frame: Frame) -> int:
        """By how many boxes there are more when it is opened."""
        return sum(1 if isinstance(r, Frame) or not every_op else r[1] - r[0] for r in frame.runs()) - 1

    opened = {root.call}
    parents = {inner.call: f.call for f in with_parts for inner in f.frames}
    if cut is not None:
        opened |= {f.call for f in with_parts if f.call.start < cut < f.call.end}
    total = 1 + sum(drawn(f) for f in with_parts if f.call in opened)
    while True:  # each turn opens one group, the largest; where it has no room, smaller ones stay closed as well
        groups: dict[tuple[int, str], list[Frame]] = {}
        for f in with_parts:
            if f.call not in opened and parents[f.call] in opened and f.size > SMALL_MODULE:
                groups.setdefault((f.depth, f.call.kind), []).append(f)
        group = max(groups.values(), key=lambda g: (max(f.size for f in g), -g[0].call.start), default=[])
        if not group or total + sum(map(drawn, group)) > boxes:
            return Folding(frozenset(opened), every_op)
        opened.update(f.call for f in group)
        total += sum(map(drawn, group))
