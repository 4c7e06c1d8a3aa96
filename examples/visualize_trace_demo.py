"""Pictures of a model: the plan, and the plan with the cut in use, folded to what can be read."""

import argparse
import sys
from pathlib import Path

from _common import REAL_MODELS, entries, module_of, prepare

import model_zoo
from ariadne.errors import VisualizationError


def main(argv: list[str] | None = None) -> int:
    """Draw a model and return the exit status: 0, 1 where Graphviz is missing or fails, 2 for a name that is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18", help=f"{', '.join(REAL_MODELS)}, or a zoo name")
    parser.add_argument("--boundary", default="percent:50", help="where to cut")
    parser.add_argument("--outdir", type=Path, default=Path(), help="where the pictures go (here)")
    parser.add_argument(
        "--fileformat", choices=("svg", "pdf", "png", "dot"), default="svg", help="dot needs no Graphviz"
    )
    parser.add_argument("--view-detail", choices=("module", "operation"), default="module")
    options = parser.parse_args(argv)
    try:
        (entry,) = entries([options.model])
    except model_zoo.UnknownNameError as error:
        parser.error(str(error))
    runtime = prepare(entry, entry.build().eval(), options.boundary)
    print(f"{entry.name}: {len(runtime.plan.nodes)} ops, cut at {runtime.split_id} {module_of(runtime)}")
    for view in ("trace", "split"):
        outpath = options.outdir / f"{view}_graph"
        try:
            print(runtime.visualize(view, outpath, fileformat=options.fileformat, view_detail=options.view_detail))
        except VisualizationError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
