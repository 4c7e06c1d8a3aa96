"""Cuts by meaning, resolved against the candidates of a runtime."""

from __future__ import annotations

import random
from typing import Any

from ariadne import PythonSplit
from conformance.suite.statuses import Status, Stop

_PERCENT = {"q25": "percent:25", "q50": "percent:50", "q75": "percent:75"}


def usable(runtime: Any, trained: bool = False) -> list[Any]:
    """The safe cuts of a runtime; where they are to be `trained`, those that it trains across. Stop where there is none."""
    safe = [c for c in runtime.candidates if c.safe and not (trained and getattr(c, "inexact", ""))]
    if not safe:
        what = "safe, and trains exactly" if trained else "safe"
        raise Stop(Status.UNSUPPORTED, f"none of the {len(runtime.candidates)} cuts is {what}")
    return safe


def resolve(runtime: Any, cut: str) -> Any:
    """What to hand to `resplit` for a cut by meaning, among the safe cuts of a runtime; see `cases.CUTS`."""
    if cut in _PERCENT:
        return _PERCENT[cut]
    if cut.startswith("mod:"):
        return f"after:{cut.removeprefix('mod:')}"
    safe = usable(runtime)
    if cut == "first":
        return safe[0]
    if cut == "last":
        return safe[-1]
    if cut in ("narrowest", "widest"):
        sign = 1 if cut == "narrowest" else -1
        return min(safe, key=lambda c: (sign * c.boundary_bytes, c.cut))
    return random.Random(int(cut.removeprefix("rand:"))).choice(safe)


def cut_facts(runtime: Any) -> dict[str, Any]:
    """The resolved op of a cut and the plan that it belongs to, as they go into a result."""
    candidate = runtime.candidate
    if isinstance(runtime, PythonSplit):
        facts = {"op": candidate.cut, "label": candidate.split_id, "plan": "none", "captured": "python"}
        return facts | ({"stays": runtime.stays[:300]} if runtime.stays else {})
    plan = runtime.plan
    nodes = getattr(plan, "nodes", ())
    name = getattr(nodes[candidate.cut - 1], "name", "") if 0 < candidate.cut <= len(nodes) else ""
    return {
        "op": candidate.cut,
        "label": name or candidate.split_id,
        "plan": plan.signature,
        "captured": str(getattr(plan, "captured_by", "")),
    }
