"""`python -m conformance.random_networks FILE.json ...` replays programs, and says for each what differs or what ran."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from conformance.random_networks.compare import Different
from conformance.random_networks.corpus import load
from conformance.random_networks.trial import trial
from conformance.random_networks.twins import Invalid


def main(arguments: list[str] | None = None) -> int:
    """Replay the programs that the command line names; the number of those that fail."""
    parser = argparse.ArgumentParser(prog="python -m conformance.random_networks", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    torch.set_num_threads(1)
    failures = 0
    for path in parser.parse_args(arguments).files:
        try:
            print(f"{path}: equal; {trial(load(path))}")
        except Invalid as error:
            print(f"{path}: the whole model can't run: {error}")
            failures += 1
        except Different as error:
            print(f"{path}: {error}")
            failures += 1
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main()))
