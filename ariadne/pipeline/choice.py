"""Where to cut a plan in several parts, and which parts share what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ariadne.cut import SplitCandidate, held_by_itself, parameters_read, parse_boundary, select
from ariadne.errors import FrontierError, SpecError
from ariadne.pipeline.alone import parts_of
from ariadne.plan import Groups, TracePlan, uses
from ariadne.runtime import keeps_sides

Cuts = tuple[SplitCandidate, ...]


def usable(plan: TracePlan, candidates: Sequence[SplitCandidate]) -> list[SplitCandidate]:
    """The cuts that a pipeline may take: safe ones, where the plan trains such whose gradients are the whole's to the last bit,
    and none between an op that writes state and another that uses it."""
    spans = [(moved.first, moved.last) for moved in _moved(plan)]
    return [
        c
        for c in candidates
        if c.safe and not (plan.grad_enabled and c.inexact) and not any(a < c.cut <= b for a, b in spans)
    ]


def named(plan: TracePlan, candidates: Sequence[SplitCandidate], boundaries: Sequence[str]) -> Cuts:
    """The cuts that boundary strings name, which must ascend."""
    found = tuple(select(plan, candidates, parse_boundary(b)) for b in boundaries)
    for text, cut in zip(boundaries, found, strict=True):
        if plan.grad_enabled and cut.inexact:
            raise FrontierError(f"cannot train across {text!r}: {cut.inexact}. Cut elsewhere")
    for (a, one), (b, other) in zip(pairs := list(zip(boundaries, found, strict=True)), pairs[1:], strict=False):
        if one.cut >= other.cut:
            raise FrontierError(
                f"boundaries must ascend: {b!r} ({other.split_id}) does not come after {a!r} ({one.split_id}). Put them in the "
                "order of forward"
            )
    return found


def alike(
    plan: TracePlan,
    candidates: Sequence[SplitCandidate],
    main: TracePlan,
    cuts: Cuts,
    boundaries: Sequence[str],
) -> Cuts:
    """Cuts of another plan of the same model, so that each part keeps its parameters."""
    if boundaries and all(b.startswith("after:") for b in boundaries):
        try:
            return named(plan, candidates, boundaries)
        except FrontierError:  # this plan has no such cuts: take some like them
            pass
    pool, found = usable(plan, candidates), list[SplitCandidate]()
    for cut in cuts:
        sides = {"prefix": _read(main, 0, cut.cut), "suffix": _read(main, cut.cut, len(main.nodes))}
        share = cut.cut / len(main.nodes) * len(plan.nodes)
        near = sorted(
            (c for c in pool if not found or c.cut > found[-1].cut),
            key=lambda c: (
                c.after != cut.after,
                abs(c.cut - (cut.cut if len(plan.nodes) == len(main.nodes) else share)),
            ),
        )
        fit = next((c for c in near[:200] if keeps_sides(plan, c, sides)), None)
        if fit is None:
            raise FrontierError(
                f"for such inputs forward runs in another way than at capture, and can't be cut near {cut.split_id} so that each "
                "part keeps its parameters; prepare a pipeline of its own for them"
            )
        found.append(fit)
    return tuple(found)


def _read(plan: TracePlan, start: int, stop: int) -> dict[tuple[str, str], None]:
    values = (plan.values.get(name) for node in plan.nodes[start:stop] for name in node.reads)
    return {(v.origin[0], v.origin[1]): None for v in values if v is not None and v.kind == "parameter"}


def users(model: nn.Module, plans: Mapping[TracePlan, Cuts]) -> dict[str, tuple[int, ...]]:
    """The parameters that more than one part reads, by the model's first name for each, with these parts in order."""
    found: dict[int, set[int]] = {}
    for plan, cuts in plans.items():
        for i, part in enumerate(parts_of(plan, cuts)):
            for path, key in parameters_read(plan, part):
                p = model.get_submodule(path)._parameters.get(key)
                if p is not None:
                    found.setdefault(id(p), set()).add(i)
    return {name: tuple(sorted(found[id(p)])) for name, p in model.named_parameters() if len(found.get(id(p), ())) > 1}


class _Moved(NamedTuple):
    """State that is written: what, the first and last op that use it, and one that writes it."""

    what: str
    first: int
    last: int
    written: int


def _moved(plan: TracePlan) -> list[_Moved]:
    """The state that ops or stores of a plan write, where more than one op uses it."""
    groups = Groups(plan)
    state = {groups.find(n): v for n, v in plan.values.items() if held_by_itself(v)}
    writers: dict[Any, list[int]] = {}
    users: dict[Any, list[int]] = {}
    for i, node in enumerate(plan.nodes, plan.first):
        for names, into in ((node.writes, writers), ((*node.reads, *node.writes), users)):
            for name in names:
                if name in groups.parent and (root := groups.find(name)) in state:
                    into.setdefault(root, []).append(i)
        for name in node.reads:
            if (v := plan.values.get(name)) is not None and v.is_state:
                users.setdefault(v.origin[:2], []).append(i)
    given = [(name, plan.first + len(plan.nodes) - 1) for name in uses(plan.output)]  # the last part gives it
    for store in plan.stores:
        at = plan.first if store.table == "input" else max(plan.first, plan.stored_from(store) - 1)
        writers.setdefault((store.path, store.name), []).append(at)
        given += [(name, at) for name in uses(store.atoms)]
    for name, i in given:
        if (v := plan.values.get(name)) is not None and v.is_state:
            users.setdefault(v.origin[:2], []).append(i)
            users.setdefault(groups.find(name), []).append(i)
    found = []
    for what, wrote in writers.items():
        used = [*wrote, *users.get(what, ())]
        if min(used) < max(used):
            named = (state[what].origin or (state[what].name,)) if what in state else what
            found.append(_Moved(".".join(str(o) for o in named if o != ""), min(used), max(used), min(wrote)))
    return found


def refuse_moved(plan: TracePlan, cuts: Cuts) -> None:
    """Raise `FrontierError` where one part writes state that another uses: each would have one of its own."""
    places = [c.cut for c in cuts]
    for what, *ops in _moved(plan):
        first, last, wrote = (bisect_right(places, op) for op in ops)
        if first < last:
            raise FrontierError(
                f"a pipeline can't be cut so: {what!r} is written by part {wrote} and used by part "
                f"{last if wrote == first else first}, and "
                "each process would have one of its own. Cut so that one part has both"
            )


def placed(model: nn.Module, plan: TracePlan, cuts: Cuts, index: int) -> dict[int, None]:
    """The tensors of the model's tables that a part reads, writes or stores, by id."""
    part, found = parts_of(plan, cuts)[index], dict[int, None]()
    names = {*part.reads(plan), *(n for node in part.nodes(plan) for n in node.writes)}
    places = [
        (v.kind, *v.origin[:2])
        for n in names
        if (v := plan.values.get(n)) is not None and v.kind in ("parameter", "buffer")
    ]
    places += [("buffer", s.path, s.name) for s in part.stores(plan) if s.table == "_buffers"]
    for kind, path, key in places:
        t = model.get_submodule(path).__dict__[f"_{kind}s"].get(key)
        if t is not None:
            found[id(t)] = None
    return found


def counted(parts: Any) -> int:
    """How many parts were asked for; `SpecError` for anything but an integer of 2 or more."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 2:
        raise SpecError(f"parts is a number of parts, 2 or more; found {parts!r}")
    return parts
