"""Reports at the command line: `python -m reports RUN… [--baseline RUN] --output FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reports import index, runs
from reports.build import build


def main(argv: list[str] | None = None) -> int:
    """Write a report and say where it is; returns 2 where the raw results can't be meant."""
    names = ", ".join(runs.KINDS)
    parser = argparse.ArgumentParser("python -m reports", description="Raw results in, one self-contained page out.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"folders with any of {names}")
    parser.add_argument("--baseline", type=Path, metavar="RUN", help="an earlier run to compare with")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="for index.html, summary.md, data/ (the first RUN's report/)"
    )
    parser.add_argument("--index", action="store_true", help="write the page over all published runs in the folder RUN")
    given = parser.parse_args(argv)
    if given.index:
        try:
            print(f"the index is at {index.write(given.runs[0]).resolve()}")
        except ValueError as error:
            print(f"reports: {error}", file=sys.stderr)
            return 2
        return 0
    output = given.output or given.runs[0] / "report"
    try:
        report = build(given.runs, given.baseline, output)
    except ValueError as error:
        print(f"reports: {error}", file=sys.stderr)
        return 2
    for card in report.cards:
        print(f"{card.title}: {card.value}")
    for name in report.unread:
        print(f"left aside, for it holds no raw results: {name}")
    print(f"the report is at {(output / 'index.html').resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
