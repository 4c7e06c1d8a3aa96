"""The benchmarks as commands: `python -m benchmarks run …`, `… compiled …`, `… zoo …`, `… cuda …` and `… summary FILE…`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch

import model_zoo
from benchmarks import campaign, whole_zoo
from benchmarks.models import SETS, meant
from benchmarks.records import Records, read
from benchmarks.runner import Options, Runner
from benchmarks.subject import TASKS
from benchmarks.summary import text
from benchmarks.variants import SHORT, find

QUICK_VARIANTS = ("model", "export", "split_module", "generated", "compiled")
QUICK = {"pairs": 12, "settle": 5, "start_processes": 1}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return 0, 1 where any sample failed; 2 is the exit status for what can't be meant."""
    options = _parser().parse_args(argv)
    if options.command == "summary":
        try:
            _show(read(*options.files))
        except (OSError, ValueError) as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 2
        return 0
    return _campaign(options) if options.command == "cuda" else _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure in fresh processes; continues a file that is there")
    _measures(run)
    compiled = commands.add_parser(
        "compiled",
        help='ten small models on a CPU: mode="compiled" without options beside torch.compile(model); a run with its own defaults',
    )
    _measures(compiled)
    compiled.set_defaults(
        models=["small"],
        variants=["model", "compile", "default"],
        start_processes=0,
        cache=Path("results/compiled-cache"),
    )
    zoo = commands.add_parser(
        "zoo",
        help="every model of the zoo in eager mode, and why each is above 1.02 that is; a run with its own defaults",
    )
    _measures(zoo)
    zoo.set_defaults(models=["zoo", "toys"], variants=["model", "generated"], start_processes=0, pairs=20)
    cuda = commands.add_parser("cuda", help="all that a CUDA device is asked, most valuable first, within a time")
    cuda.add_argument("--minutes", type=float, default=28.0, help="after which nothing goes on (28)")
    cuda.add_argument("--models", nargs="+", help=f"names of the zoo, or sets: {', '.join(SETS)} (cuda)")
    cuda.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: to rehearse it (cuda)")
    cuda.add_argument("--small", action="store_true", help="few rounds, small batches, two small models: a rehearsal")
    cuda.add_argument("--steps", nargs="+", choices=campaign.STEPS, default=(), help="only these (all)")
    cuda.add_argument("--cache", type=Path, help="where what is compiled is kept for the next run (in the output)")
    cuda.add_argument("--output", type=Path, required=True, help="a folder; what it holds is not run again")
    cuda.set_defaults(parser=cuda)
    summary = commands.add_parser("summary", help="print what files of results say")
    summary.add_argument("files", nargs="+", type=Path)
    return parser


def _measures(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run."""
    parser.add_argument("--models", nargs="+", help=f"names of the zoo, or sets: {', '.join(SETS)}")
    parser.add_argument("--batches", nargs="+", type=_positive, help="batch sizes (1)")
    parser.add_argument("--variants", nargs="+", help=f"of {', '.join(SHORT)} (all)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["inference"])
    parser.add_argument("--processes", type=_positive, default=5, help="processes for each model (5)")
    parser.add_argument(
        "--start-processes", type=_natural, help="processes for the costs at the start (as --processes)"
    )
    parser.add_argument("--start-batches", nargs="+", type=_positive, help="batches for these (as --batches)")
    parser.add_argument("--pairs", type=_positive, help="rounds in each process (30)")
    parser.add_argument("--settle", type=_positive, help="calls before steady state (10)")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of each process (1)")
    parser.add_argument(
        "--abreast", type=_positive, default=1, help="processes that prepare at once; one at a time is timed (1)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--require-cuda", action="store_true", help="the same as --device cuda: refuse where there is none"
    )
    parser.add_argument(
        "--reference", default=os.environ.get("ARIADNE_REFERENCE"), help="a Python or folder with ariadne-split"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one process (1800)")
    parser.add_argument("--quick", action="store_true", help="two small models, few rounds, no verdict on break-even")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument(
        "--cache", type=Path, help="where what is compiled is kept for the next run (none: anew in each run)"
    )
    parser.set_defaults(parser=parser)


def _campaign(given: argparse.Namespace) -> int:
    _refuse_absent(given, given.device)
    try:
        models = meant(given.models or ["quick" if given.small else "cuda"])
    except model_zoo.UnknownNameError as error:
        given.parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = campaign.run(
        models, given.device, given.minutes, given.output, given.small, progress, given.steps, given.cache
    )
    if (measured := given.output / "benchmarks.jsonl").exists():
        _show(read(measured))
    return int(failed > 0)


def _refuse_absent(given: argparse.Namespace, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        given.parser.error(
            "CUDA was asked for, and torch finds no CUDA device; measure with --device cpu, or elsewhere"
        )


def _run(given: argparse.Namespace) -> int:
    device = "cuda" if given.require_cuda else given.device
    _refuse_absent(given, device)
    try:
        models = meant(given.models or (["quick"] if given.quick else [device]))
        variants = [find(v).name for v in given.variants or (QUICK_VARIANTS if given.quick else SHORT)]
    except (model_zoo.UnknownNameError, ValueError) as error:
        given.parser.error(str(error))
    quick = QUICK if given.quick else {}
    starts = given.processes if given.start_processes is None else given.start_processes
    options = Options(
        models=models,
        batches=tuple(dict.fromkeys(given.batches or (1,))),
        variants=tuple(dict.fromkeys(variants)),
        tasks=tuple(dict.fromkeys(given.tasks)),
        device=device,
        processes=given.processes,
        start_processes=quick.get("start_processes", starts) if given.start_processes is None else starts,
        start_batches=tuple(given.start_batches or ()),
        pairs=given.pairs or quick.get("pairs", 30),
        settle=given.settle or quick.get("settle", 10),
        threads=given.threads,
        timeout=given.timeout,
        reference=given.reference,
        abreast=given.abreast,
        cache=given.cache and given.cache.absolute(),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process at work is ended, too
    try:
        if given.command == "zoo":
            failed = whole_zoo.run(options, given.output, progress)
        else:
            failed = Runner(options, given.output, progress).run()
    except ValueError as error:
        given.parser.error(str(error))
    _show(read(given.output))
    return int(failed > 0)


def _show(records: Records) -> None:
    """Print what records say, the zoo's one figure last."""
    print(text(records) + whole_zoo.text(records))


def progress(line: str) -> None:
    """One line that changes on a terminal, a line for each thing that is done elsewhere."""
    running = line.endswith("…")
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="" if running else "\n", file=sys.stderr, flush=True)
    elif not running:
        print(line, file=sys.stderr, flush=True)


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1; found {value}")
    return number


def _natural(value: str) -> int:
    number = int(value)
    if number < 0:
        raise argparse.ArgumentTypeError(f"at least 0; found {value}")
    return number


if __name__ == "__main__":
    sys.exit(main())
