"""Repeats: blocks of a model that follow one another and are alike in all that a drawing could tell, so that one stands for all.

Alike means: the same ops with the same arguments, values of the same shapes and types, modules nested in the same way, and the
same wiring. Each takes from the one before it what the next takes from it, all take the same values from elsewhere, and nobody
but the next reads what one makes, save the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ariadne.plan import Expr, Ref, TracePlan, uses
from ariadne.visualization.fold import Frame

LONGEST = 4  # modules in one turn: those of a Swin stage are alike two by two
SMALL_TURN = 3  # ops; so few are drawn once only where there are
MANY = 4  # turns of them

Run = Frame | tuple[int, int]
Look = tuple[
    Any, tuple[str, ...], tuple[str, ...]
]  # what is the same in its likes, values from elsewhere, tensors of the model


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` turns of `length` ops each, from op `start` on; the first stands for all."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        """The op after the last turn."""
        return self.start + self.length * self.count

    def turn(self, op: int) -> int | None:
        """Which turn an op is in, from 0 on; None outside of them.

        >>> Repeat(4, 3, 2).turn(7)
        1
        """
        return (op - self.start) // self.length if self.start <= op < self.end else None


class Repeats:
    """Finds the repeats of one plan."""

    def __init__(self, plan: TracePlan) -> None:
        self.plan = plan
        self.position = {n: (i, k) for i, node in enumerate(plan.nodes) for k, n in enumerate(node.outputs)}
        self.readers: dict[str, list[int]] = {}
        for i, node in enumerate(plan.nodes):
            for name in node.reads:
                self.readers.setdefault(name, []).append(i)
        for name in uses(plan.output):
            self.readers.setdefault(name, []).append(len(plan.nodes))
        self.looks: dict[tuple[int, int], Look] = {}
        self.outward: dict[tuple[int, int], frozenset[tuple[int, int]]] = {}

    def find(self, runs: Sequence[Run], at: int) -> tuple[int, Repeat] | None:
        """How many runs, from the one `at` this place on, are in one turn of a repeat that begins here; the longest there is."""
        found: list[tuple[int, Repeat]] = []
        for period in range(1, min(LONGEST, (len(runs) - at) // 2) + 1):
            turns = [runs[i : i + period] for i in range(at, len(runs) - period + 1, period)]
            count = self._alike(turns)
            start, end = span(turns[0])
            if count > 1 and (end - start > SMALL_TURN or count >= MANY):
                found.append((period, Repeat(start, end - start, count)))
        return max(found, key=lambda f: (f[1].end, -f[0]), default=None)

    def _alike(self, turns: Sequence[Sequence[Run]]) -> int:
        """How many of these turns, from the first on, can be drawn as one."""
        spans = [span(turn) for turn in turns]
        length = spans[0][1] - spans[0][0]
        kinds = _kinds(turns[0])
        count = 1
        while (
            count < len(turns)
            and spans[count][1] - spans[count][0] == length
            and self._targets(spans[count]) == self._targets(spans[0])
            and _kinds(turns[count]) == kinds
            and self._look(spans[count])[0] == self._look(spans[0])[0]
            and self._wired(spans, count)
            and self._read_by(spans[count - 1], spans[count])
        ):
            count += 1
        while count > 1 and not self._outward(spans[count - 1]) <= self._outward(spans[0]):
            count -= 1  # more is read of the last than its likes give
        return count

    def _targets(self, span: tuple[int, int]) -> list[str]:
        return [node.target for node in self.plan.nodes[span[0] : span[1]]]

    def _wired(self, spans: Sequence[tuple[int, int]], k: int) -> bool:
        """Whether turn k takes from turn k - 1 and from elsewhere what turn 1 takes from turn 0 and from elsewhere."""
        taken = [self._taken(spans, k, j) for j in range(len(self._look(spans[k])[1]))]
        if None in taken or (k > 1 and taken != [self._taken(spans, 1, j) for j in range(len(taken))]):
            return False
        own = self._own(spans, k)
        before = {name for span in spans[:k] for name in self._look(span)[2]}
        tied = any(name in before for name, same in zip(self._look(spans[k])[2], own, strict=True) if not same)
        return own == self._own(spans, 1) and not tied

    def _taken(self, spans: Sequence[tuple[int, int]], k: int, j: int) -> str | tuple[int, int] | None:
        """What turn k takes from elsewhere in the place j: the place in the turn before, or the name that all take; else None."""
        name = self._look(spans[k])[1][j]
        made, output = self.position.get(name, (-1, 0))
        if spans[k - 1][0] <= made < spans[k - 1][1]:
            return made - spans[k - 1][0], output
        return name if name == self._look(spans[0])[1][j] else None

    def _own(self, spans: Sequence[tuple[int, int]], k: int) -> list[bool]:
        """For each tensor of the model, whether the turn before uses the same one."""
        return [a == b for a, b in zip(self._look(spans[k - 1])[2], self._look(spans[k])[2], strict=True)]

    def _read_by(self, span: tuple[int, int], following: tuple[int, int]) -> bool:
        """Whether what a turn makes is read in it and in the next alone."""
        made = (name for node in self.plan.nodes[span[0] : span[1]] for name in node.outputs)
        return all(span[0] <= reader < following[1] for name in made for reader in self.readers.get(name, ()))

    def _outward(self, span: tuple[int, int]) -> frozenset[tuple[int, int]]:
        """The places of what is read outside of a turn."""
        if span not in self.outward:
            self.outward[span] = frozenset(
                (i - span[0], k)
                for i in range(*span)
                for k, name in enumerate(self.plan.nodes[i].outputs)
                if any(reader >= span[1] for reader in self.readers.get(name, ()))
            )
        return self.outward[span]

    def _look(self, span: tuple[int, int]) -> Look:
        if span not in self.looks:
            self.looks[span] = self._looked(*span)
        return self.looks[span]

    def _looked(self, start: int, end: int) -> Look:
        """A turn in words that are the same for its likes."""
        plan, others, state = self.plan, dict[str, int](), dict[str, int]()

        def kind(name: str) -> Any:
            value = plan.values.get(name)
            return value and (value.shape, value.dtype, value.is_state and (value.kind, value.requires_grad))

        def place(name: str) -> Any:
            made, output = self.position.get(name, (-1, 0))
            if start <= made < end:
                return "here", made - start, output
            value = plan.values.get(name)
            which = state if value is not None and (value.is_state or value.kind == "constant") else others
            return "state" if which is state else "other", which.setdefault(name, len(which)), kind(name)

        def said(atom: Any) -> Any:
            if isinstance(atom, Ref):
                return "ref", place(atom.name), atom.item
            if isinstance(atom, Expr):
                return "expr", atom.source, tuple(map(place, sorted(atom.names)))
            if isinstance(atom, slice):
                return "slice", said(atom.start), said(atom.stop), said(atom.step)
            if isinstance(atom, tuple):
                return tuple(map(said, atom))
            return type(atom).__name__, repr(atom)

        words = tuple(
            (
                node.target,
                said(node.args),
                tuple((key, said(value)) for key, value in node.kwargs),
                tuple(map(kind, node.outputs)),
                tuple(map(place, node.writes)),
                (node.region.grad, node.region.autocast, node.region.switches),
                (node.unpack, node.seeded, node.is_witness, repr(node.witness)),
            )
            for node in plan.nodes[start:end]
        )
        return words, tuple(others), tuple(state)


def span(runs: Sequence[Run]) -> tuple[int, int]:
    """The first op of runs that follow one another, and the one after the last."""
    (start, _), (_, end) = _ends(runs[0]), _ends(runs[-1])
    return start, end


def _ends(run: Run) -> tuple[int, int]:
    return (run.call.start, run.call.end) if isinstance(run, Frame) else run


def _kinds(runs: Sequence[Run]) -> list[Any]:
    """The modules in a turn: what each is, where it begins and ends, and what it is called within the outermost around it."""
    start, found = span(runs)[0], list[Any]()
    for run in runs:
        if not isinstance(run, Frame):
            found.append((run[0] - start, run[1] - start))
            continue
        for f in run.inside():
            name = f.call.path.removeprefix(f"{run.call.path}.") if f is not run else ""
            found.append((f.call.kind, f.call.start - start, f.call.end - start, name))
    return found
