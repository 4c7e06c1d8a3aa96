"""The scripts of wrong cases, run again: a process for each system, and what each script printed is kept beside the answers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.scoreboard.records import Results
from conformance.scoreboard.table import Board, board, shown

AGAIN = "again"


def run(path: Path) -> list[str]:
    """Run the script of each counted wrong case of a file, but those that printed the same before.

    Returns the cases that printed something else, in words.
    """
    results = Results(path)
    known = last_of([path])
    others = []
    for system in board([path]).systems:
        wrong = [case for case in system.wrong if not known.get(case.key)]
        if not wrong:
            continue
        scripts = [shown(case) for case in wrong]
        command = [sys.executable, "-m", "conformance.scoreboard", "scripts"]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, input=json.dumps(scripts), env=environment, text=True, capture_output=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith(AGAIN + " ")]
        printed = [json.loads(line.removeprefix(AGAIN + " ")) for line in lines]
        printed += [[f"the process ended with {done.returncode}"]] * (len(scripts) - len(printed))
        for case, words in zip(wrong, printed, strict=True):
            said = numberless(f"{case.outcome}: {case.words}")
            same = said in map(numberless, words)  # a script goes on after the first wrong step
            results.write(
                AGAIN, {"target": case.target, "program": case.program, "question": case.question, "same": same}
            )
            if not same:
                others.append(f"{' '.join(case.key)}: {words[-1:]} instead of {case.outcome}: {case.words!r}")
        print(f"{system.name}: {len(scripts)} scripts", flush=True)
    return others


def numberless(words: str) -> str:
    """The words without their numbers: what reads memory that nobody wrote is wrong by another amount each time.

    >>> numberless("wrong: values differ in 12 of 16 elements, by at most 0.39")
    'wrong: values differ in # of # elements, by at most #'
    """
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", words)


def scripts(text: str) -> None:
    """Run scripts, a JSON list of them, and print the lines that each one prints; this is what runs in a system's process."""
    for script in json.loads(text):
        heard = io.StringIO()
        try:
            with contextlib.redirect_stdout(heard):
                exec(script, {"__name__": "__main__"})
            last = heard.getvalue().rstrip().splitlines()
        except Exception as error:
            last = [f"{type(error).__name__}: {error}".replace("\n", " ")]
        print(AGAIN, json.dumps(last), flush=True)


def repeated(found: Board, paths: Sequence[Path]) -> tuple[int, int]:
    """How many of the counted wrong cases were run again, and how many of these printed the same."""
    last = last_of(paths)
    known = [last[case.key] for system in found.systems for case in system.wrong if case.key in last]
    return len(known), sum(known)


def last_of(paths: Sequence[Path]) -> dict[tuple[str, str, str], bool]:
    """The cases that were run again, and whether they printed the same the last time."""
    lines = [line for path in paths for line in Results(path).of(AGAIN)]
    return {(line["target"], line["program"], line["question"]): bool(line["same"]) for line in lines}
