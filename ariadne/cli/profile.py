"""`ariadne profile`: bytes, and where measured time, along all cuts of a model, as a picture or a page."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from ariadne.check import FORMATS, frontier_profile
from ariadne.cli.options import boundary, outfile
from ariadne.cli.output import Answer, progress
from ariadne.cli.subject import load
from ariadne.cut import parse_boundary


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
