"""`ariadne parts`: a model in several parts: how even they are, what crosses, and what each schedule leaves idle."""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

from ariadne.cli.output import Answer, progress, table
from ariadne.cli.subject import load
from ariadne.cut import frontiers
from ariadne.errors import SpecError
from ariadne.pipeline import Costs, Layout, layouts, usable


def run(options: Namespace) -> Answer:
    """Capture, measure, and lay out."""
    if options.into < 2:
        raise SpecError(f"--into is a number of parts, 2 or more; found {options.into}")
    subject = load(options)
    captured = subject.captured()
    plan, example = captured.plan, subject.example
    candidates = frontiers(plan)
    pool = usable(plan, candidates)
    with progress(f"measuring {subject.name} ..."):
        asked = subject.owning(lambda: Costs.of(options.balance, subject.model, plan, candidates, example))
        timed = asked
        if options.balance != "time":
            timed = subject.owning(lambda: Costs.of("time", subject.model, plan, candidates, example))
    found = layouts(pool, asked, options.into, options.balance)
    count = options.microbatches or 2 * options.into
    text = [
        f"{subject.name}: {len(plan.nodes)} ops, {len(pool)} cuts that a pipeline can take, in {options.into} parts"
    ]
    data: dict[str, Any] = {"model": subject.name, "ops": len(plan.nodes), "microbatches": count, "layouts": []}
    for layout in found:
        times = timed.parts(layout.cuts)
        text += [
            "",
            f"{layout.name}: the dearest part costs {layout.imbalance:.2f} times the mean",
            _parts(layout, times, example.batch, len(plan.nodes)),
        ]
        schedules = _schedules(times, count)
        rows = [[s["schedule"], s["ranks"], s["idle"], s["seconds"]] for s in schedules if "idle" in s]
        text += [
            "",
            table(
                ["schedule", "ranks", ">idle", ">step"],
                [[n, r, f"{i:.0%}", f"{t * 1e3:.1f} ms"] for n, r, i, t in rows],
            ),
        ]
        data["layouts"].append(
            {
                "name": layout.name,
                "cuts": [c.split_id for c in layout.cuts],
                "boundaries": [f"after:{c.after}" if c.after else c.split_id for c in layout.cuts],
                "seconds": times,
                "imbalance": layout.imbalance,
                "bytes": [c.boundary_bytes * example.batch for c in layout.cuts],
                "schedules": schedules,
            }
        )
    text += [
        "",
        f"times are of a forward pass at batch {example.batch} here, back is taken as twice as long; {count} micro-batches a step",
    ]
    return Answer("\n".join(text), data)


def _parts(layout: Layout, times: list[float], batch: int, ops: int) -> str:
    ends = [0, *(c.cut for c in layout.cuts), ops]
    rows = []
    for i, seconds in enumerate(times):
        cut = layout.cuts[i] if i < len(layout.cuts) else None
        where = "" if cut is None else f"after:{cut.after}" if cut.after else cut.split_id
        sent = "" if cut is None else f"{cut.boundary_bytes * batch:.0f}"
        rows.append([i, ends[i + 1] - ends[i], f"{seconds * 1e3:.2f} ms", where, sent])
    return table(["part", "ops", ">time", "ends", ">bytes sent"], rows)


def _schedules(times: list[float], count: int) -> list[dict[str, Any]]:
    """What each of torch's schedules makes of it; of one that can't run so, why."""
    idle = importlib.import_module("ariadne.pipeline.idle")
    names = importlib.import_module("ariadne.pipeline.steps").NAMES
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            one = idle.played(name, times, count)
        except SpecError as error:
            found.append({"schedule": name, "refused": str(error)})
            continue
        found.append({"schedule": name, "ranks": one.ranks, "idle": one.idle, "seconds": one.seconds})
    return found
