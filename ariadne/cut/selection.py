"""Selection: from a parsed boundary to one candidate, or an error that shows where else to cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from ariadne.cut.frontier import SplitCandidate
from ariadne.cut.spec import Boundary, Objective
from ariadne.errors import FrontierError, SpecError, nearest
from ariadne.plan import TracePlan

SMALLEST_SHARE = 0.1
WINDOW = 0.05  # of all ops, to either side of a percentage


class Weighed(Protocol):
    """What an objective weighs of a cut."""

    @property
    def cut(self) -> int: ...
    @property
    def after(self) -> str: ...
    @property
    def prefix_ops(self) -> int: ...
    @property
    def suffix_ops(self) -> int: ...
    @property
    def boundary_bytes(self) -> float: ...


Cut = TypeVar("Cut", bound=Weighed)
_OBJECTIVES = ("boundary_bytes", "prefix_ops", "suffix_ops", "max_boundary_bytes", "min_share")


def select(
    plan: TracePlan,
    candidates: Sequence[SplitCandidate],
    boundary: Boundary,
    *,
    trainable: bool = False,
    objective: Objective | None = None,
) -> SplitCandidate:
    """The candidate that `boundary` means.

    Percentages and "auto" choose among safe cuts, with something to train in the suffix if `trainable`; a cut that is
    named must itself be safe. A percentage means the cut with the fewest bytes within 5 % of the ops to either side, and the
    nearest where none lies so near. Of equal ones both take the end of a whole module, the outermost first. Raises
    `FrontierError` with the reason and the nearest safe splits.
    """
    if not candidates:
        raise FrontierError(f"the plan has {len(plan.nodes)} op(s), so there is nothing to cut; split a larger model")
    if boundary.kind in ("after", "cut"):
        cut = boundary.cut if boundary.kind == "cut" else _after(plan, candidates, boundary)
        if not 1 <= cut <= len(candidates):
            raise FrontierError(
                f"there is no 'cut:{cut}': this plan has cuts 1 to {len(candidates)}; take one of these"
            )
        chosen = candidates[cut - 1]
        asked = f"'after:{boundary.module}'" if boundary.kind == "after" else f"'cut:{cut}'"
        if not chosen.safe:
            raise FrontierError(f"cannot split at {asked}: {chosen.reason}. {_elsewhere(candidates, cut)}")
        if trainable and not chosen.trainable:
            raise FrontierError(
                f"cannot split at {asked} with trainable=True: no parameter after it requires grad. Cut earlier, unfreeze "
                "a parameter of the suffix, or pass trainable=False"
            )
        if trainable and chosen.inexact:
            raise FrontierError(
                f"cannot split at {asked} with trainable=True: {chosen.inexact}. {_elsewhere(candidates, cut, trainable)}"
            )
        return chosen
    pool = [c for c in candidates if c.safe and not (trainable and (c.inexact or not c.trainable))]
    if not pool:
        why = candidates[len(candidates) // 2].reason or "no parameter of a suffix requires grad, and trainable=True"
        raise FrontierError(
            f"none of the {len(candidates)} cuts will do; the one in the middle: {why}. runtime.candidates of a "
            "split elsewhere, or of trainable=False, gives the reason for each"
        )
    if boundary.kind == "percent":
        return around(len(plan.nodes), pool, boundary.percent)
    return best(len(plan.nodes), pool, objective)


def around(ops: int, pool: Sequence[Cut], percent: float) -> Cut:
    """The candidate of a pool that a percentage means, for a forward of so many `ops`."""
    target = percent / 100 * ops
    near = [c for c in pool if abs(c.cut - target) <= WINDOW * ops]
    if not near:
        return min(pool, key=lambda c: (abs(c.cut - target), _depth(c), c.cut))
    return min(near, key=lambda c: (c.boundary_bytes, _depth(c), abs(c.cut - target), c.cut))


def _depth(c: Weighed) -> float:
    """How deep the module lies that ends at a cut; infinitely where none does."""
    return c.after.count(".") if c.after else float("inf")


def best(ops: int, pool: Sequence[Cut], objective: Objective | None) -> Cut:
    """The candidate that an objective wants of a pool, for a forward of so many `ops`."""
    if callable(objective):
        return min(pool, key=lambda c: (objective(c), c.cut))
    numbers = isinstance(objective, Mapping) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in objective.values()
    )
    if objective is not None and not numbers:
        raise SpecError(
            f"an objective is a mapping from {', '.join(map(repr, _OBJECTIVES))} to numbers, or a callable that takes a "
            f"candidate; found {objective!r}"
        )
    wanted = dict(objective or {})
    unknown = sorted(set(wanted) - set(_OBJECTIVES))
    if unknown:
        raise SpecError(f"objective has no {unknown[0]!r}; it takes {', '.join(map(repr, _OBJECTIVES))}, or a callable")
    share = wanted.pop("min_share", SMALLEST_SHARE) * ops
    most = wanted.pop("max_boundary_bytes", float("inf"))
    weights = wanted or {"boundary_bytes": 1.0}
    inner = [c for c in pool if min(c.prefix_ops, c.suffix_ops) >= share and c.boundary_bytes <= most]
    if not inner:
        if "min_share" in (objective or {}) or most < float("inf"):
            raise FrontierError(
                f"no safe cut leaves each side {share:.0f} of {ops} ops with at most {most} boundary bytes; "
                "lower min_share, or raise max_boundary_bytes"
            )
        inner = list(pool)
    return min(inner, key=lambda c: (sum(w * float(getattr(c, k)) for k, w in weights.items()), _depth(c), c.cut))


def _after(plan: TracePlan, candidates: Sequence[SplitCandidate], boundary: Boundary) -> int:
    calls = [c for c in plan.calls if c.path == boundary.module]
    if not calls:
        known = dict.fromkeys(c.path for c in plan.calls if c.path)
        near = nearest(boundary.module, known)
        raise FrontierError(
            f"cannot split after {boundary.module!r}: forward calls no module of that name"
            + (f". Nearest: {near}" if near else f". It calls {', '.join(map(repr, list(known)[:8]))}")
        )
    if boundary.call is None and len(calls) > 1:
        raise FrontierError(
            f"cannot split after {boundary.module!r}: forward calls it {len(calls)} times; say which, from "
            f"'after:{boundary.module}#1' to 'after:{boundary.module}#{len(calls)}'"
        )
    number = boundary.call or 1
    if number > len(calls):
        raise FrontierError(
            f"cannot split after call {number} of {boundary.module!r}: forward calls it {len(calls)} time(s); write "
            f"'after:{boundary.module}#{len(calls)}' for the last"
        )
    end = calls[number - 1].end
    if end < 1 or end > len(candidates):
        where = "before" if end < 1 else "after"
        raise FrontierError(
            f"cannot split after {boundary.module!r}: no op runs {where} that point, so one side would be empty. "
            f"{_elsewhere(candidates, end)}"
        )
    return end


def _elsewhere(candidates: Sequence[SplitCandidate], cut: int, trainable: bool = False) -> str:
    near = sorted((c for c in candidates if c.safe and not (trainable and c.inexact)), key=lambda c: abs(c.cut - cut))
    named = [c for c in near if c.after][:3] or near[:3]
    names = ", ".join(repr(f"after:{c.after}" if c.after else c.split_id) for c in named)
    return f"Nearest safe splits: {names}." if names else "No cut of this plan is safe."
