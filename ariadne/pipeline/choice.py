"""Where to cut a plan in several parts, and which parts share what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ariadne.cut import SplitCandidate, parameters_read, parse_boundary, select
from ariadne.errors import FrontierError, SpecError
from ariadne.pipeline.alone import parts_of
from ariadne.plan import Groups, TracePlan
from ariadne.runtime import keeps_sides

Cuts = tuple[SplitCandidate, ...]


def usable(candidates: Sequence[SplitCandidate], trains: bool) -> list[SplitCandidate]:
    """The cuts that a pipeline may take: safe ones, and where it trains such whose gradients are the whole's to the last bit."""
    return [c for c in candidates if c.safe and not (trains and c.inexact)]


def named(plan: TracePlan, candidates: Sequence[SplitCandidate], boundaries: Sequence[str], trains: bool) -> Cuts:
    """The cuts that boundary strings name, which must ascend."""
    found = tuple(select(plan, candidates, parse_boundary(b)) for b in boundaries)
    for text, cut in zip(boundaries, found, strict=True):
        if trains and cut.inexact:
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
    trains: bool,
) -> Cuts:
    """Cuts of another plan of the same model, so that each part keeps its parameters."""
    if boundaries and all(b.startswith("after:") for b in boundaries):
        try:
            return named(plan, candidates, boundaries, trains)
        except FrontierError:  # this plan has no such cuts: take some like them
            pass
    pool, found = usable(candidates, trains), list[SplitCandidate]()
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


def refuse_moved(plan: TracePlan, cuts: Cuts) -> None:
    """Raise `FrontierError` where one part writes state that another uses: each would have one of its own."""
    groups = Groups(plan)
    state = {groups.find(n): v for n, v in plan.values.items() if v.is_state}
    writers: dict[Any, set[int]] = {}
    readers: dict[Any, set[int]] = {}
    for i, part in enumerate(parts_of(plan, cuts)):
        read, written = {*part.reads(plan)}, {name for node in part.nodes(plan) for name in node.writes}
        for names, into in ((written, writers), (read | written, readers)):
            for name in names & groups.parent.keys():
                if (root := groups.find(name)) in state:
                    into.setdefault(root, set()).add(i)
        for name in read:
            if (v := plan.values.get(name)) is not None and v.is_state:
                readers.setdefault(v.origin[:2], set()).add(i)
        for store in part.stores(plan):
            writers.setdefault((store.path, store.name), set()).add(i)
    for what, wrote in writers.items():
        if len(both := wrote | readers.get(what, set())) > 1:
            where = ".".join(str(o) for o in (state[what].origin if what in state else what) if o != "")
            a, b = sorted(both)[:2]
            user = b if a in wrote else a
            raise FrontierError(
                f"a pipeline can't be cut so: {where!r} is written by part {min(wrote)} and used by part {user}, and "
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
