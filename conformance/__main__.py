"""The suite at the command line: `python -m conformance --help`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conformance.suite import device, lock, results, run, summary
from conformance.suite.environment import TARGETS
from conformance.suite.queries import compact


def main(arguments: list[str]) -> int:
    """Do what the command line says; returns an exit status: 0 green, 1 not, 2 a command that can't be meant."""
    try:
        if arguments[:1] == ["summary"]:
            return summary.main(arguments[1:])
        if arguments[:1] == ["merge"]:
            return merge(arguments[1:])
        if arguments[:1] == ["judge"]:
            return judge(arguments[1:])
        return cases(arguments)
    except ValueError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2


def merge(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m conformance merge", description="Print several files of results as one."
    )
    parser.add_argument("results", nargs="+", type=Path)
    found = results.read(*parser.parse_args(arguments).results)
    found.hold_single()
    for line in results.merged(found):
        print(line)
    return 0


def judge(arguments: list[str]) -> int:
    """Give the verdict on files of results, such as those of all shards: what the suite has and they have not is missing."""
    parser = argparse.ArgumentParser(
        "python -m conformance judge",
        description="Give the verdict on files of results, of shards or merged: every case of the tier must have one.",
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--tier", required=True, help="smoke, full or nightly")
    parser.add_argument("--family", action="append", default=[], help="only models of this library; may be repeated")
    _files(parser)
    given = parser.parse_args(arguments)
    found = results.read(*given.results)
    found.hold_single()
    found.hold_of_one_code()
    options = run.Options(
        tier=given.tier, families=tuple(given.family),
        lock=given.lock_from, tiers=given.tiers_from, expectations=given.expectations_from,
    )  # fmt: skip
    return run.judged(found, options)


def _files(parser: argparse.ArgumentParser) -> None:
    """The files that tests put in the place of the suite's own."""
    for name, default in (
        ("lock", run.lock.LOCK),
        ("tiers", run.tiers.FILE),
        ("expectations", run.expectations.FOLDER),
    ):
        parser.add_argument(f"--{name}-from", type=Path, default=default, help=argparse.SUPPRESS)


def cases(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m conformance",
        description="Run cases of the suite: those that every option given means. "
        "Also: `summary RESULTS…`, `merge RESULTS…`, `judge RESULTS… --tier TIER`.",
    )
    add = parser.add_argument
    add(
        "--case", action="append", default=[], metavar="QUERY", help="a case's name, or a prefix and *; may be repeated"
    )
    add("--tier", help="smoke, full or nightly: the cases and the minutes that tiers.toml gives it")
    add("--family", action="append", default=[], help="only models of this library; may be repeated")
    add(
        "--shard",
        type=shard,
        default=(1, 1),
        metavar="I/N",
        help="every model belongs to one of N shards: run the I-th",
    )
    add("--device", choices=device.DEVICES, default="cpu", help="where the models live (cpu)")
    add("--target", default="ariadne", help=f"{', '.join(TARGETS)}, or package.module:factory")
    add("--results", type=Path, metavar="FILE", help="where results go; by default a new file in results/")
    add(
        "--resume", type=Path, metavar="FILE", help="append to these results, and skip what has run in this environment"
    )
    add("--minutes", type=float, help="another time limit than the tier's")
    add("-n", "--processes", type=int, default=2, help="how many models may run at a time (2)")
    add("--list", action="store_true", help="print the names of the cases, and run nothing")
    add("--update-expectations", type=Path, metavar="FILE", help="make this file of expectations fit what was found")
    add("--update-lock", action="store_true", help="write cases.lock anew from the suite's matrix, and run nothing")
    add("--runner", default=run.RUNNER, help=argparse.SUPPRESS)
    _files(parser)
    given = parser.parse_args(arguments)
    if given.update_lock:
        return update_lock(given.lock_from)
    if not (given.case or given.tier or given.list):
        parser.error("say which cases: --case 'forward/nn/*', --tier smoke; --list prints the names")
    device.use(given.device)
    options = run.Options(
        tuple(given.case), given.tier, tuple(given.family), given.shard, given.target, given.results, given.resume,
        given.update_expectations, given.minutes, given.processes, given.runner,
        given.lock_from, given.tiers_from, given.expectations_from,
    )  # fmt: skip
    if given.list:
        for case in run.select(options, lock.read(options.lock)):
            print(case)
        return 0
    return run.run(options)


def shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N")
    return int(index), int(count)


def update_lock(path: Path) -> int:
    """Write every case of the matrix to the lock; the libraries of all families must be installed."""
    from conformance.suite import matrix  # noqa: PLC0415 - it imports torch, which no other command needs in this process

    found = list(matrix.all_cases())
    path.write_text(lock.text(found), encoding="utf-8")
    print(f"{path.name}: {len(found)} cases in {len(compact(found))} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
