"""`ariadne show`: the generated source of a cut's two sides."""

from __future__ import annotations

from argparse import Namespace

from ariadne.cli.options import boundary
from ariadne.cli.output import Answer
from ariadne.cli.subject import load
from ariadne.cut import ends_of, parse_boundary
from ariadne.units import size


def run(options: Namespace) -> Answer:
    """Split, and print."""
    asked = boundary(options.cut)
    parse_boundary(asked)
    subject = load(options)
    runtime = subject.prepared(asked)
    c = runtime.candidate
    sources = {"prefix": runtime.prefix_source, "suffix": runtime.suffix_source}
    shown = {side: text for side, text in sources.items() if options.side in (None, side)}
    after = f", after {c.after}" if c.after else ""
    head = (
        f"# {subject.name}, {c.split_id}{after}: {c.prefix_ops} + {c.suffix_ops} ops, {size(c.boundary_bytes)} per sample "
        f"across (the input is {size(ends_of(runtime.plan).input_bytes)}). {runtime.plan.batch_symbol} is the batch; p_NAME, "
        "b_NAME and a_NAME are what module NAME holds as parameters, buffers and attributes"
    )
    data = {"model": subject.name, "split_id": c.split_id, "after": c.after, "live": list(c.live), **shown}
    return Answer("\n".join([head, *(f"\n{text.rstrip()}" for text in shown.values())]), data)
