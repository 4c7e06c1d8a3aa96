"""`ariadne profile`: bytes, and where measured time, along all cuts of a model, as a picture or a page."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from ariadne.check import FORMATS, frontier_profile
from ariadne.cli.options import Commands, boundary, model_command, outfile, positive
from ariadne.cli.output import Answer, progress
from ariadne.cli.subject import load
from ariadne.cut import parse_boundary

ABOUT = "draw what crosses at every cut of a model, and with --measure the prefix's share of the time"


def add(commands: Commands) -> None:
    """Add the command."""
    made = model_command(commands, "profile", ABOUT, run)
    made.add_argument("--split", default="auto", metavar="CUT", help="the cut that is marked as chosen (auto)")
    made.add_argument("--out", metavar="PATH", help="where it goes (frontier_profile, here)")
    made.add_argument(
        "--format", choices=FORMATS, help="(by the ending of --out, or svg); html is a page to hover and click in"
    )
    made.add_argument("--measure", action="store_true", help="time the halves at some of the cuts, in this process")
    made.add_argument("--places", type=positive, default=12, metavar="N", help="at how many cuts (12)")
    made.add_argument("--iterations", type=positive, default=20, metavar="N", help="calls at each (20)")


def run(options: Namespace) -> Answer:
    """Split, measure if asked to, and draw."""
    asked = boundary(options.split)
    parse_boundary(asked)
    out, form = outfile(options.out, options.format, FORMATS)
    subject = load(options)
    runtime = subject.prepared(asked)
    given: dict[str, Any] = {}
    if options.measure:
        given = {"measure": True, "example_inputs": subject.args, "example_kwargs": subject.kwargs,
                 "cuts": options.places, "iterations": options.iterations}  # fmt: skip
    with progress(f"{'measuring' if options.measure else 'drawing'} {subject.name} ..."):
        path = subject.owning(lambda: frontier_profile(runtime, out, fileformat=form, **given))
    safe = sum(c.safe for c in runtime.candidates)
    text = f"{subject.name}: {len(runtime.candidates)} cuts, {safe} of them safe; {runtime.split_id} is marked: {path}"
    return Answer(text, {"model": subject.name, "split_id": runtime.split_id, "path": str(path)})
