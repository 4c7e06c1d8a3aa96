"""`python -m conformance.random_networks FILE.json ...` replays programs, and says for each what differs or what ran.

Of a file of results, `FILE.jsonl`, the programs are replayed of which something was refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from conformance.random_networks.compare import Different
from conformance.random_networks.corpus import load
from conformance.random_networks.program import Program
from conformance.random_networks.trial import trial
from conformance.random_networks.twins import Invalid


def main(arguments: list[str] | None = None) -> int:
    """Replay the programs that the command line names; the number of those that fail."""
    parser = argparse.ArgumentParser(prog="python -m conformance.random_networks", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    torch.set_num_threads(1)
    failures = 0
    for name, program in (named for path in parser.parse_args(arguments).files for named in _programs(path)):
        try:
            print(f"{name}: equal; {trial(program)}")
        except Invalid as error:
            print(f"{name}: the whole model can't run: {error}")
            failures += 1
        except Different as error:
            print(f"{name}: {error}")
            failures += 1
    return failures


def _programs(path: Path) -> Iterator[tuple[str, Program]]:
    if path.suffix != ".jsonl":
        yield str(path), load(path)
        return
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for k, example in enumerate(json.loads(text)["refused_examples"]):
            yield f"{path}:{number}, refused {k}", Program.parse(json.dumps(example["program"]))


if __name__ == "__main__":
    sys.exit(min(1, main()))
