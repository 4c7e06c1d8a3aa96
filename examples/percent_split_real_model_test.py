"""Real models captured once and cut at several percentages: replay and training against the whole, bit for bit."""

import argparse
import sys

from _common import REAL_MODELS, entries, module_of, prepare, replayed, table, trained

import model_zoo

BATCH = 3


def main(argv: list[str] | None = None) -> int:
    """Check each model at each cut and return the exit status: 0, 1 where any differs, 2 for a name that is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", required=True, help=f"all, {', '.join(REAL_MODELS)}, or a zoo name")
    parser.add_argument("--percents", nargs="+", type=float, default=[25, 50, 75], metavar="P")
    options = parser.parse_args(argv)
    try:
        chosen = entries(options.models)
    except model_zoo.UnknownNameError as error:
        parser.error(str(error))
    rows, failures = [], []
    for entry in chosen:
        inference, training = (prepare(entry, entry.build().train(train)) for train in (False, True))
        for percent in options.percents:
            boundary = f"percent:{percent:g}"
            split = inference.resplit(boundary)
            found = replayed(split, entry, BATCH) + trained(training.resplit(boundary), entry, BATCH)
            ops = f"{split.candidate.prefix_ops} + {split.candidate.suffix_ops}"
            size = f"{split.candidate.boundary_bytes:,.0f}"
            rows.append((entry.name, boundary, f"{split.split_id} {module_of(split)}", ops, size, f"{found.largest:g}"))
            print(*rows[-1], file=sys.stderr, flush=True)
            if found.words:
                failures.append(f"{entry.name} at {boundary}: {found.words}")
    print(table(("model", "boundary", "cut", "ops", "bytes per sample", "largest difference"), rows))
    print(*failures, sep="\n", end="\n" if failures else "")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
