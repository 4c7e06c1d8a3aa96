"""Parts: consecutive ops of a plan as one function, of the values that come in to the values that go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ariadne.cut.frontier import SplitCandidate
from ariadne.plan import Store, TraceNode, TracePlan, Value, uses

SIDES = ("prefix", "suffix")


@dataclass(frozen=True, slots=True)
class Part:
    """The ops `start` to `stop` of a plan: they take the values `takes` and give the values `gives`, or the plan's output (None).

    A prefix is a part that takes the model's inputs, a suffix one that gives its output; those between them take and give what
    crosses two cuts. `written`: the values that it takes of which it makes copies first, since it or a later part writes into them.
    """

    name: str
    start: int
    stop: int
    takes: tuple[str, ...]
    gives: tuple[str, ...] | None
    written: tuple[str, ...] = ()

    def nodes(self, plan: TracePlan) -> tuple[TraceNode, ...]:
        """Its ops."""
        return plan.between(self.start, self.stop)

    def stores(self, plan: TracePlan) -> list[Store]:
        """What of the plan's stores it does: those of which it is the first to have everything."""
        first = self.start == plan.first
        return [
            s
            for s in plan.stores
            if plan.stored_before(self.stop, s) and (first or not plan.stored_before(self.start, s))
        ]

    def reads(self, plan: TracePlan) -> Iterator[str]:
        """The values that it reads, some more than once: for its ops, for what it stores, and for the output, if it gives that."""
        for node in self.nodes(plan):
            yield from node.reads
        for store in self.stores(plan):
            yield from uses(store.atoms)
        if self.gives is None:
            yield from uses(plan.output)

    def final(self, plan: TracePlan) -> tuple[str, ...]:
        """The values that it must still have when its last op has run, for what it gives."""
        return tuple(uses(plan.output)) if self.gives is None else self.gives


def parts(plan: TracePlan, cuts: Sequence[SplitCandidate], names: Sequence[str]) -> tuple[Part, ...]:
    """The parts between cuts of a plan, in order; one more than there are cuts."""
    end = plan.first + len(plan.nodes)
    starts, stops = [plan.first, *(c.cut for c in cuts)], [*(c.cut for c in cuts), end]
    if plan.apart is not None and plan.apart.part == SIDES[0]:  # all its ops, with those that other paths need
        starts[1:], stops[:1] = [end], [end]
    takes = [tuple(name for _, name in plan.inputs), *(c.live for c in cuts)]
    gives = [*(c.live for c in cuts), None]
    written = [(), *(c.written for c in cuts)]
    return tuple(map(Part, names, starts, stops, takes, gives, written))


def parameters_read(plan: TracePlan, part: Part) -> dict[tuple[str, str], None]:
    """The parameters that a part reads, as (module path, name), in the order of their first use."""
    values = map(plan.values.get, part.reads(plan))
    return {(v.origin[0], v.origin[1]): None for v in values if v is not None and v.kind == "parameter"}


def others_read(plan: TracePlan, part: Part) -> list[Value]:
    """The tensors that a part reads and that may get gradients, but are no parameters: such as weights that a hypernetwork made."""
    values = {name: v for name in part.reads(plan) if (v := plan.values.get(name)) is not None}
    held = {"attribute": True, "constant": True, "buffer": False}  # of buffers there are many, and few do
    return [
        v for v in values.values() if v.differentiable and (held.get(v.kind) or (v.kind in held and v.requires_grad))
    ]
