"""Folding: the ops of a plan as nested module calls, and which of those are drawn open, closed, or op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ariadne.plan import ModuleCall, TracePlan

Depth = int | None | Literal["auto"]
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


def fold(
    root: Frame, depth: Depth, *, cut: int | None, fits: Callable[[Folding], bool], firsts: bool = True
) -> Folding:
    """What is drawn open where modules deeper than `depth` are to be closed; None opens all.

    "auto" opens, from the largest, all modules of one kind and depth together, as long as the drawing `fits`; with `firsts`, where
    all of them do not, the first of each that has other parts in it, or the first alone. It stops at those of which none has
    room. Those that `cut` falls into are open in any case.
    """
    small = root.size <= SMALL_PLAN
    with_parts = [f for f in root.inside() if f.frames or f is root]
    if depth != "auto":
        return Folding(frozenset(f.call for f in with_parts if depth is None or f.depth < depth), small)
    parents = {inner.call: f.call for f in with_parts for inner in f.frames}
    opened = {root.call, *(f.call for f in with_parts if cut is not None and f.call.start < cut < f.call.end)}
    left = {f.call: f for f in with_parts if f.call not in opened and f.size > SMALL_MODULE}
    found = Folding(frozenset(opened), small)
    if small and not fits(found):
        found = Folding(frozenset(opened), False)
    while True:  # each turn opens one group, the largest
        groups: dict[tuple[int, str], list[Frame]] = {}
        for f in left.values():
            if parents[f.call] in found.opened:
                groups.setdefault((f.depth, f.call.kind), []).append(f)
        group = max(groups.values(), key=lambda g: (max(f.size for f in g), -g[0].call.start), default=[])
        one_of_each = list({_parts(f): f for f in reversed(group)}.values())
        for some in (group, one_of_each, group[:1]) if firsts else (group,):
            wider = Folding(found.opened | {f.call for f in some}, found.every_op)
            if some and fits(wider):
                found = wider
                break
        else:
            return found
        for f in group:
            del left[f.call]


def _parts(frame: Frame) -> tuple[tuple[str, int], ...]:
    """What is in a module: kinds and sizes."""
    return tuple((f.call.kind, f.size) for f in frame.frames)
