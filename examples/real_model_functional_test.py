"""Real models split at percent:50: replay across batch sizes and training, bit for bit against the whole model."""

import argparse
import sys

from _common import REAL_MODELS, Compared, entries, module_of, prepare, replayed, trained

import model_zoo

REPLAYED, TRAINED = (1, 2, 3), (2, 3)


def main(argv: list[str] | None = None) -> int:
    """Check each model and return the exit status: 0, or 1 where any differs, or 2 for a name that is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["all"], help=f"all, {', '.join(REAL_MODELS)}, or a zoo name")
    options = parser.parse_args(argv)
    try:
        chosen = entries(options.models)
    except model_zoo.UnknownNameError as error:
        parser.error(str(error))
    failed = 0
    for entry in chosen:
        found = Compared()
        runtime = prepare(entry, entry.build().eval())
        print(f"{entry.name}: {runtime.split_id} {module_of(runtime)}, captured by {runtime.plan.captured_by}")
        for batch in REPLAYED:
            found += replayed(runtime, entry, batch)
        runtime = prepare(entry, entry.build().train())
        for batch in TRAINED:
            found += trained(runtime, entry, batch)
        failed += found.words is not None
        sizes = f"replayed at batch {', '.join(map(str, REPLAYED))}, trained at {', '.join(map(str, TRAINED))}"
        print(f"  {found.words or f'{sizes}: equal in every bit'}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} models equal")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
