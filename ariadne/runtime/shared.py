"""What two plans share up to a question: a call whose answer is that of the other plan goes on there, and nothing runs twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ariadne.compare import same_bits
from ariadne.cut import Part, held_by_itself
from ariadne.plan import Groups, Store, TraceNode, TracePlan, uses


@dataclass(frozen=True, slots=True)
class Rest(Part):
    """What is left of the part `whole` of a plan after a question, and first the ops `late` which another plan does not need."""

    whole: Part | None = None
    late: tuple[int, ...] = ()

    def nodes(self, plan: TracePlan) -> tuple[TraceNode, ...]:
        """Its ops."""
        return (*(plan.nodes[i] for i in self.late), *plan.between(self.start, self.stop))

    def stores(self, plan: TracePlan) -> list[Store]:
        """All that the whole part stores: that is done last."""
        assert self.whole is not None
        return self.whole.stores(plan)


def rest(
    one: TracePlan, mine: tuple[Part, Part], at: int, other: TracePlan, theirs: tuple[Part, Part], side: int
) -> Rest | None:
    """How a side of the plan `one` goes on in `other` after its op `at`; None where they don't do the same up to there.

    `mine` and `theirs`: prefix and suffix of each. Values have the same names in both, since forward's Python is the same up to
    the question. Ops that write, draw or ask must be the same in order; one without effects may be missing in `one`, if it can run
    late.
    """
    asked, answered = [i for i, _ in one.questions if i <= at], [i for i, _ in other.questions]
    if len(answered) < len(asked) or one.inputs != other.inputs or one.keeps_inputs or other.keeps_inputs:
        return None
    there, part = answered[len(asked) - 1], theirs[side]
    if not part.start <= there < part.stop or other.nodes[there].region.autocast:
        return None
    if side == 1 and not _same_prefix(one, mine, other, theirs):
        return None
    known, effects = _done(one, at)
    theirs_known, theirs_effects = _done(other, there)
    if len(effects) != len(theirs_effects) or not all(map(_alike, effects, theirs_effects)):
        return None
    late, made = [], {name for _, name in other.inputs}
    for i, node in enumerate(other.nodes[: there + 1]):
        if not is_pure(node) or known.get(node.outputs) == theirs_known[node.outputs]:
            if not all(same_value(one, other, name) for name in node.reads):
                return None
            made.update(node.outputs)
        elif i < part.start or theirs_known[node.outputs][1] != sum(bool(n.writes) for n in effects):
            return None  # what it reads may be another by now
        else:
            late.append(i)
    if any(held_by_itself(p.values[n]) for p, side_of in ((one, mine), (other, theirs)) for n in side_of[side].takes):
        return None  # it is in the boundary, and not in what ran until the question
    found = Rest(part.name, there + 1, part.stop, (), part.gives, (), part, tuple(late))
    nodes, here = found.nodes(other), {n for node in found.nodes(other) for n in node.outputs}
    names = [*(r for node in nodes for r in node.reads), *found.final(other)]
    names += [n for store in found.stores(other) for n in uses((store.atoms, store.needs))]
    needed = [
        n for n in dict.fromkeys(names) if n in other.values and n not in here and (n in made or n in other.definitions)
    ]
    if not made.issuperset(needed):
        return None
    return Rest(part.name, there + 1, part.stop, tuple(needed), part.gives, (), part, tuple(late))


def is_pure(node: TraceNode) -> bool:
    """Whether an op only makes values: it writes, draws and asks nothing."""
    return not (node.writes or node.seeded or node.is_witness or node.target.startswith("python.")) and bool(
        node.outputs
    )


def _done(plan: TracePlan, at: int) -> tuple[dict[tuple[str, ...], tuple[TraceNode, int]], list[TraceNode]]:
    """The ops up to one: those without effects, by what they make, each with the number of writes before it; and the others."""
    pure: dict[tuple[str, ...], tuple[TraceNode, int]] = {}
    effects: list[TraceNode] = []
    writes = 0
    for node in plan.nodes[: at + 1]:
        if is_pure(node):
            pure[node.outputs] = node, writes
        else:
            effects.append(node)
            writes += bool(node.writes)
    return pure, effects


def _alike(a: TraceNode, b: TraceNode) -> bool:
    fields = ("target", "args", "kwargs", "outputs", "unpack", "module", "call", "region", "writes", "seeded")
    return all(getattr(a, name) == getattr(b, name) for name in fields)


def same_value(one: TracePlan, other: TracePlan, name: str) -> bool:
    """Whether a name stands for the same in both, where no op makes it."""
    if name in other.objects:
        return one.objects.get(name) is other.objects[name]
    if name not in other.values:
        return one.batch_symbol == other.batch_symbol
    a, b = one.values.get(name), other.values[name]
    if a is None or (a.kind, a.origin) != (b.kind, b.origin):
        return False
    if b.kind == "constant":
        x, y = one.constants[name], other.constants[name]
        return x.stride() == y.stride() and same_bits(x, y)
    return True


def _same_prefix(one: TracePlan, mine: tuple[Part, Part], other: TracePlan, theirs: tuple[Part, Part]) -> bool:
    """Whether the prefixes of two plans move the same, so that either suffix may follow."""
    some, others = ([n for n in p.nodes[: s[0].stop] if not is_pure(n)] for p, s in ((one, mine), (other, theirs)))
    stores = mine[0].stores(one) == theirs[0].stores(other)
    return stores and some == others and {*mine[1].written} == {*theirs[1].written}


Going = tuple[Callable[..., Any], tuple[str, ...]]


def made_alike(mine: TracePlan, stop: int, other: TracePlan, there: int) -> frozenset[str]:
    """The values that two plans make by the same op, and write into by the same ops, before op `stop` of one and `there` of the
    other: on the same inputs they hold the same there."""
    ops, others = _made_by(mine, stop), _made_by(other, there)
    return frozenset(name for name, found in ops.items() if others.get(name) == found)


def _made_by(plan: TracePlan, stop: int) -> dict[str, list[TraceNode]]:
    """By value, the op before `stop` that makes it, and those that write into its memory, or into what may be its memory."""
    groups, writers = Groups(plan), dict[str, list[TraceNode]]()
    nodes = plan.nodes[:stop]
    for node in nodes:
        for root in {groups.find(name) for name in node.writes if name in groups.parent}:
            writers.setdefault(root, []).append(node)
    return {name: [node, *writers.get(groups.find(name), ())] for node in nodes for name in node.outputs}
