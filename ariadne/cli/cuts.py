"""`ariadne cuts`: every place at which a model can be cut, what crosses there, and why one will not do."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ariadne.cli.options import boundary
from ariadne.cli.output import Answer, table
from ariadne.cli.subject import load
from ariadne.cut import Ends, SplitCandidate, ends_of, frontiers, parse_boundary, select
from ariadne.errors import FrontierError
from ariadne.plan import TracePlan
from ariadne.units import size

ORDERS = {
    "cut": lambda c: c.cut,
    "bytes": lambda c: (c.boundary_bytes, c.cut),
    "ops": lambda c: (abs(c.prefix_ops - c.suffix_ops), c.cut),
}


def run(options: Namespace) -> Answer:
    """Capture, and list or explain."""
    asked = None if options.why is None else parse_boundary(boundary(options.why))
    subject = load(options)
    plan = subject.captured().plan
    candidates = frontiers(plan)
    if asked is not None:
        open_to = tuple(replace(c, reason="") for c in candidates) if asked.kind in ("cut", "after") else candidates
        return _why(plan, candidates, candidates[select(plan, open_to, asked).cut - 1])
    chosen = [c for c in candidates if (c.safe or not options.safe) and (c.trainable or not options.trainable)]
    chosen = sorted(chosen, key=ORDERS[options.sort])[: options.top]
    rows = [row(plan, c) for c in chosen]
    text = _csv(rows) if options.csv else _text(subject.name, ends_of(plan), candidates, chosen, rows)
    safe = sum(c.safe for c in candidates)
    ends = asdict(ends_of(plan))
    return Answer(text, {"model": subject.name, "cuts": len(candidates), "safe": safe, **ends, "candidates": rows})


def row(plan: TracePlan, c: SplitCandidate) -> dict[str, Any]:
    """One cut as data."""
    return {
        "split_id": c.split_id,
        "after": c.after,
        "op": plan.nodes[c.cut - 1].name,
        "module": plan.nodes[c.cut - 1].module,
        "safe": c.safe,
        "boundary_bytes": c.boundary_bytes,
        "values": list(c.live),
        "prefix_ops": c.prefix_ops,
        "suffix_ops": c.suffix_ops,
        "trainable_prefix": c.trainable_prefix,
        "trainable_suffix": c.trainable,
        "reason": c.reason,
        "inexact": c.inexact,
    }


def _text(
    name: str,
    ends: Ends,
    candidates: Sequence[SplitCandidate],
    chosen: Sequence[SplitCandidate],
    rows: Sequence[dict[str, Any]],
) -> str:
    heads = ["cut", "after module", "last op", ">per sample", "values", "prefix", "suffix", "safe", "to train"]
    lines = [
        (r["split_id"], r["after"], r["op"], size(r["boundary_bytes"]), len(r["values"]), r["prefix_ops"],
         r["suffix_ops"], r["safe"], _trains(r))
        for r in rows
    ]  # fmt: skip
    safe = [c for c in candidates if c.safe]
    found = f"{name}: {len(candidates)} cuts, {len(safe)} of them safe; {len(chosen)} shown"
    notes = [
        f"{found}. prefix and suffix count ops.",
        _beside(ends, safe),
        "Cut with split='cut:N', or 'after:MODULE' where a module ends; N is of this plan: training mode has other ops.",
    ]
    if len(safe) < len(candidates):
        unsafe = next((c for c in chosen if not c.safe), next(c for c in candidates if not c.safe))
        notes.append(f"Why one is not safe: --why {unsafe.split_id}")
    return "\n".join([table(heads, lines), "", *notes] if rows else notes)


def _beside(ends: Ends, safe: Sequence[SplitCandidate]) -> str:
    """What the cuts stand beside: sending the input itself, and the answer."""
    less = sum(c.boundary_bytes < ends.input_bytes for c in safe)
    found = f"{less} of the safe cuts {'sends' if less == 1 else 'send'} less" if less else "no safe cut sends less"
    return f"The input is {size(ends.input_bytes)} per sample, the output {size(ends.output_bytes)}: {found} than the input."


def _trains(r: dict[str, Any]) -> str:
    sides = [side for side in ("prefix", "suffix") if r[f"trainable_{side}"]]
    return "both" if len(sides) == 2 else "".join(sides) or "neither"


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = list(rows[0]) if rows else []
    writer.writerow(keys)
    writer.writerows([" ".join(v) if isinstance(v, list) else v for v in r.values()] for r in rows)
    return out.getvalue().rstrip("\n")


def _why(plan: TracePlan, candidates: Sequence[SplitCandidate], c: SplitCandidate) -> Answer:
    """Why a cut is safe or not, and what crosses it."""
    env = plan.traced
    crossing = [plan.values[name] for name in c.live]
    last, first = plan.nodes[c.cut - 1], plan.nodes[c.cut]
    made = {v.name: plan.node(v.name).module if v.name in plan.definitions else "an input" for v in crossing}
    after = f", which ends {c.after!r}," if c.after else ""
    lines = [
        f"{c.split_id} is {'safe' if c.safe else 'not safe'}: between {last.name!r} ({_in(last.module)}){after} and "
        f"{first.name!r} ({_in(first.module)})",
        f"{c.prefix_ops} + {c.suffix_ops} ops; {size(c.boundary_bytes)} per sample cross it, in {len(crossing)} value(s):",
    ]
    rows = [(v.name, v.describe(), size(v.nbytes(env) / (plan.traced_batch or 1)), _in(made[v.name])) for v in crossing]
    notes = [*(f"the suffix writes into {n!r}, and so takes a copy of it first" for n in c.written)]
    if c.inexact:
        notes.append(f"no training step may cross it: {c.inexact}")
    message = ""
    if not c.safe:
        try:
            select(plan, candidates, parse_boundary(c.split_id))
        except FrontierError as error:
            message = str(error)
        notes.append(message)
    text = "\n".join([*lines, table(["value", "type", ">per sample", "made in"], rows) if rows else "", "", *notes])
    data = {**row(plan, c), "message": message, "written": list(c.written)}
    data["values"] = [{"name": v.name, "type": v.describe(), "made_in": made[v.name]} for v in crossing]
    return Answer(text.rstrip(), data)


def _in(module: str) -> str:
    return module or "the model itself"
