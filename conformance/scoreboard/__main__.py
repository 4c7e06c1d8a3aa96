"""The scoreboard at the command line: `python -m conformance.scoreboard --help`."""

from __future__ import annotations

import argparse
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import model_zoo
from conformance import wild
from conformance.scoreboard import again, chosen, page, runner
from conformance.scoreboard.programs import QUICK
from conformance.scoreboard.questions import QUESTIONS, script
from conformance.targets import NAMES


def main(arguments: list[str]) -> int:
    """Do what the command line says; 0 done, 1 Ariadne is wrong or a script prints something else, 2 can't be meant."""
    parser = argparse.ArgumentParser("python -m conformance.scoreboard", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ask = commands.add_parser("run", help="ask, and append the answers to a file; what it has is not asked again")
    ask.add_argument("--target", action="append", help=f"one of {', '.join(NAMES)}, or a .py file; may be repeated")
    ask.add_argument(
        "--program", action="append", help="a pattern such as 'one/*' or 'torchvision/resnet*', or 'board'; repeatable"
    )
    ask.add_argument("--results", type=Path, default=Path("results/scoreboard/answers.jsonl"))
    ask.add_argument("--limit", type=float, default=20, help="seconds of processor time for each question")
    ask.add_argument("--minutes", type=float, help="begin no program after this many")
    show = commands.add_parser("page", help="draw the page of files of answers")
    show.add_argument("results", type=Path, nargs="+")
    show.add_argument("--output", type=Path, default=Path("results/scoreboard"))
    public = commands.add_parser(
        "publish", help="draw the page of the models that every system of a file was asked about"
    )
    public.add_argument("results", type=Path)
    public.add_argument("output", type=Path)
    again_ = commands.add_parser("again", help="run the script of every counted wrong case of a file again")
    again_.add_argument("results", type=Path)
    commands.add_parser("count", help="count the parameters of the zoo's models, by which `board` is chosen")
    commands.add_parser("scripts")  # what `again` starts
    repeat = commands.add_parser("repeat", help="repeat one case: TARGET PROGRAM QUESTION")
    repeat.add_argument("target")
    repeat.add_argument("program")
    repeat.add_argument("question", choices=QUESTIONS)
    child = commands.add_parser("child")  # what `run` starts
    child.add_argument("--target", required=True)
    child.add_argument("--results", type=Path, required=True)
    child.add_argument("--limit", type=float, required=True)
    options = parser.parse_args(arguments)
    try:
        if options.command == "child":
            runner.child(options.target, options.results, options.limit)
        elif options.command == "run":
            until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
            programs = programs_of(options.program or ["one/*"])
            runner.run(options.target or NAMES, programs, options.results, limit=options.limit, until=until)
        elif options.command == "again":
            others = again.run(options.results)
            print("\n".join(others) or "every script printed what stands in the table")
            return 1 if others else 0
        elif options.command == "count":
            chosen.count()
        elif options.command == "scripts":
            again.scripts(sys.stdin.read())
        elif options.command in ("page", "publish"):
            found = (page.write if options.command == "page" else page.publish)(options.results, options.output)
            print(f"{options.output / 'index.html'}; wrong without a word where promised, of Ariadne: {found}")
            return 1 if found else 0
        else:
            code = script(options.target, options.program, QUESTIONS[options.question])
            print(code, end="\n\n")
            exec(code, {"__name__": "__main__"})
    except ValueError as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2
    return 0


def programs_of(patterns: list[str]) -> list[str]:
    """The programs whose names match, in the patterns' order, "board" those of `chosen`; ValueError where none does."""
    known = [*QUICK, *model_zoo.names(), *wild.names()]
    found: list[str] = []
    for pattern in patterns:
        matching = chosen.board() if pattern == "board" else [name for name in known if fnmatch(name, pattern)]
        if not matching:
            raise ValueError(
                f"no program matches {pattern!r}; toys are one/…, models of the zoo `python -m model_zoo list`"
            )
        found += [name for name in matching if name not in found]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
