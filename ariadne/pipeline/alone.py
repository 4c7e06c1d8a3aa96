"""One part of a plan alone: a plan of its own, which takes what crosses the cut before it and gives what crosses the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ariadne import tree
from ariadne.cut import SIDES, Part, SplitCandidate, parts
from ariadne.plan import Apart, Ref, TracePlan
from ariadne.runtime import told_apart

_LEAF = tree.Spec(tree.LEAF)
_NOTHING = tree.flatten(((), {}))[1]


def parts_of(plan: TracePlan, cuts: Sequence[SplitCandidate]) -> tuple[Part, ...]:
    """The parts between cuts, in order; the first is a prefix, each other one a suffix of what ends with it."""
    return parts(plan, cuts, [SIDES[0], *(SIDES[1] for _ in cuts)])


def until(plan: TracePlan, end: SplitCandidate | None) -> TracePlan:
    """The plan of the ops before a cut, whose output are the values that cross it; the whole plan where there is none."""
    if end is None:
        return plan
    part = Part(SIDES[0], plan.first, end.cut, (), end.live)
    return replace(
        plan,
        nodes=part.nodes(plan),
        output=tuple(Ref(name) for name in end.live),
        output_spec=tree.Spec("tuple", tuple, children=(_LEAF,) * len(end.live)),
        stores=tuple(part.stores(plan)),
    )


def alone(plan: TracePlan, cuts: Sequence[SplitCandidate], index: int) -> TracePlan:
    """Part `index` of a plan as a plan that holds its ops alone; it keeps their numbers and the signature of the whole."""
    part = parts_of(plan, cuts)[index]
    if index == 0:
        apart: Apart = told_apart(plan, cuts[0], SIDES[0], 0)
        return replace(
            plan, nodes=part.nodes(plan), output=(), output_spec=tree.Spec("tuple", tuple),
            stores=tuple(part.stores(plan)), apart=apart,
        )  # fmt: skip
    whole = until(plan, cuts[index] if index < len(cuts) else None)
    return replace(
        whole, nodes=part.nodes(plan), inputs=(), literals=(), input_spec=_NOTHING, tied_inputs=(), given={},
        stores=tuple(part.stores(plan)), apart=told_apart(plan, cuts[index - 1], SIDES[1], part.start),
    )  # fmt: skip
