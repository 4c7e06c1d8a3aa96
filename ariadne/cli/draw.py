"""`ariadne draw`: a model, whole or cut, as a picture."""

from __future__ import annotations

import argparse
from argparse import Namespace

from ariadne.cli.options import Commands, boundary, model_command, outfile, positive
from ariadne.cli.output import Answer, progress
from ariadne.cli.subject import load
from ariadne.cut import frontiers, parse_boundary, select
from ariadne.visualization import Depth, View, visualize

ABOUT = "draw a model, or with a cut its prefix, what crosses, and its suffix"
FORMATS = ("svg", "pdf", "png", "dot")


def add(commands: Commands) -> None:
    """Add the command."""
    made = model_command(commands, "draw", ABOUT, run)
    made.add_argument("cut", metavar="CUT", nargs="?", help="where to cut; without it the model is drawn whole")
    made.add_argument("--out", metavar="PATH", help="where the picture goes (trace_graph or split_graph, here)")
    made.add_argument("--format", choices=FORMATS, help="(by the ending of --out, or svg); dot needs no Graphviz")
    made.add_argument("--operations", action="store_true", help="every op as a box, and not modules")
    made.add_argument(
        "--depth", type=depth, default="auto", metavar="N", help="modules shown inside one another, or all"
    )
    made.add_argument("--targets", action="store_true", help="with the ATen targets of the ops")
    made.add_argument("--markers", action="store_true", help="with what is written, drawn, aliased and switched")
    made.add_argument("--indices", action="store_true", help="with the numbers of the ops")


def depth(text: str) -> Depth:
    """A number of modules, `all` as None, or `auto`."""
    if text in ("auto", "all"):
        return "auto" if text == "auto" else None
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a number above 0, 'all' or 'auto'; found {text!r}") from None


def run(options: Namespace) -> Answer:
    """Capture, and draw."""
    asked = boundary(options.cut or "auto")
    parsed = parse_boundary(asked)
    out, form = outfile(options.out, options.format, FORMATS)
    subject = load(options)
    plan = subject.captured().plan
    candidate = select(plan, frontiers(plan), parsed) if options.cut else None  # what can't be cut is drawn whole
    view: View = "trace" if candidate is None else "split"
    with progress(f"drawing {subject.name} ..."):
        path = visualize(
            plan, candidate, view=view, outpath=out, fileformat=form, max_module_depth=options.depth,
            view_detail="operation" if options.operations else "module", show_operation_targets=options.targets,
            show_debug_markers=options.markers, show_node_indices=options.indices,
        )  # fmt: skip
    split_id = None if candidate is None else candidate.split_id
    what = "whole" if split_id is None else f"split at {split_id}"
    data = {"model": subject.name, "view": view, "split_id": split_id}
    return Answer(f"{subject.name}, {what}, {len(plan.nodes)} ops: {path}", {**data, "path": str(path)})
