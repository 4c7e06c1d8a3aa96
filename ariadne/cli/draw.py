"""`ariadne draw`: a model, whole or cut, as a picture."""

from __future__ import annotations

from argparse import Namespace

from ariadne.cli.grammar import PICTURES
from ariadne.cli.options import boundary, outfile
from ariadne.cli.output import Answer, progress
from ariadne.cli.subject import load
from ariadne.cut import frontiers, parse_boundary, select
from ariadne.visualization import View, visualize


def run(options: Namespace) -> Answer:
    """Capture, and draw."""
    asked = boundary(options.cut or "auto")
    parsed = parse_boundary(asked)
    out, form = outfile(options.out, options.format, PICTURES)
    subject = load(options)
    plan = subject.captured().plan
    candidate = select(plan, frontiers(plan), parsed) if options.cut else None  # what can't be cut is drawn whole
    view: View = "trace" if candidate is None else "split"
    with progress(f"drawing {subject.name} ..."):
        path = visualize(
            plan, candidate, view=view, outpath=out, fileformat=form, max_module_depth=options.depth,
            view_detail="operation" if options.operations else "module", show_operation_targets=options.targets,
            show_debug_markers=options.markers, show_node_indices=options.indices,
            fold_repeats=not options.unfold,
        )  # fmt: skip
    split_id = None if candidate is None else candidate.split_id
    what = "whole" if split_id is None else f"split at {split_id}"
    data = {"model": subject.name, "view": view, "split_id": split_id}
    return Answer(f"{subject.name}, {what}, {len(plan.nodes)} ops: {path}", {**data, "path": str(path)})
