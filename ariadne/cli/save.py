"""`ariadne save`: one side of a cut becomes a file that needs no model code."""

from __future__ import annotations

import os
from argparse import Namespace

from ariadne.cli.options import boundary
from ariadne.cli.output import Answer
from ariadne.cli.subject import load
from ariadne.cut import parse_boundary
from ariadne.units import size


def run(options: Namespace) -> Answer:
    """Split, and save."""
    asked = boundary(options.cut)
    parse_boundary(asked)
    subject = load(options)
    runtime = subject.prepared(asked)
    runtime.save(options.out, side=options.side, weights=not options.no_weights)
    c, nbytes = runtime.candidate, os.path.getsize(options.out)
    after = f", after {c.after}" if c.after else ""
    ops = c.prefix_ops if options.side == "prefix" else c.suffix_ops
    text = f"{options.out}: the {options.side} of {subject.name}, {c.split_id}{after}, {ops} ops, {size(nbytes)}"
    data = {
        "file": options.out,
        "bytes": nbytes,
        "model": subject.name,
        "side": options.side,
        "split_id": c.split_id,
        "after": c.after,
        "ops": ops,
        "signature": runtime.plan.signature,
    }
    return Answer(text, data)
