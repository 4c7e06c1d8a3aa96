"""Whether the parts of a side, each right in itself, go together: what was read names nothing that is not there."""

from __future__ import annotations

from ariadne.cut import SIDES, SplitCandidate
from ariadne.errors import HalfError
from ariadne.halves.atoms import need
from ariadne.halves.sized import need_sizes_of_inputs
from ariadne.plan import TracePlan, check, uses


def held_together(plan: TracePlan, candidate: SplitCandidate) -> TracePlan:
    """The plan, if each name in it is made by an op, comes in, or is at hand."""
    assert plan.apart is not None
    prefix, values = plan.apart.part == SIDES[0], plan.values
    # A prefix may have ops beyond those before its cut: what the suffixes of other paths take.
    right = plan.first == 0 and candidate.cut <= len(plan.nodes) if prefix else plan.first == candidate.cut
    need(right, "its ops are not those of one side of its cut")
    coming = [n for _, n in plan.inputs]
    known = set(coming) if prefix else set(candidate.live)
    need(
        known <= values.keys() and not known & plan.definitions.keys(),
        "a value comes in that is not there, or is made here",
    )
    need(
        set(candidate.live) <= values.keys() and set(candidate.written) <= set(candidate.live),
        "it gives what is not there",
    )
    for names in (candidate.live, candidate.written, coming):
        need(len({*names}) == len(names), "a value comes in or crosses twice")
    taken: set[str] = set()
    for v in values.values():
        constant, called = v.name in plan.constants, v.name in plan.objects
        need(constant == (v.kind == "constant"), f"{v.name!r} is a constant that is not there, or none that is")
        need(not called or v.kind == "object", f"{v.name!r} is no object, and is called")
        at_hand = v.is_state or constant or called
        made = at_hand + (v.name in known) + (v.name in plan.definitions)
        # A size that another side follows may stand in a shape; nothing here may take it.
        need(made == 1 or (made == 0 and v.kind == "scalar"), f"the value {v.name!r} is made {made} times")
        taken |= set() if made else {v.name}
    for node in plan.nodes:
        need(not taken & {*node.reads}, f"an op {node.target!r} takes a number that nothing makes")
        need(
            {*node.writes, *(n for pair in node.may_alias for n in pair)} <= values.keys(),
            "an op writes into nothing",
        )
    named = {
        *uses(plan.output),
        *(n for s in plan.stores for n in uses(s.atoms)),
        *(candidate.live if prefix else ()),
    }
    need(named <= {*values, plan.batch_symbol} - taken, "it gives a value that is not there")
    size, leaves = plan.input_spec.size, [*(i for i, _ in plan.inputs), *(i for i, _ in plan.literals)]
    if prefix:
        children = plan.input_spec.children
        whole = plan.input_spec.kind == "tuple" and [c.kind for c in children] == ["tuple", "dict"]
        need(whole and sorted(leaves) == list(range(size)), "its inputs are not the leaves of their structure")
        need(all(values[n].kind == "input" for _, n in plan.inputs), "an input is none")
        tensors = {i for i, _ in plan.inputs}
        need(all({*pair} <= tensors for pair in plan.tied_inputs), "inputs are tied that are not there")
        need_sizes_of_inputs(plan)
    else:
        need(not leaves, "a suffix takes inputs")
    try:
        return check(plan)
    except AssertionError as error:
        raise HalfError(
            f"this is not a half as Ariadne writes it: {error}. Save it again, or refuse who sent it"
        ) from None
