"""A process for each target; one that hangs or dies costs the case that it was at, and a new one goes on after that."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType

import torch

from conformance.scoreboard.asking import (
    NOT_ASKED,
    REFUSED,
    RIGHT,
    ROUNDED,
    TIMEOUT,
    WARNED,
    WRONG,
    Answer,
    OutOfTimeError,
    Pair,
    attempt,
)
from conformance.scoreboard.programs import Program, program
from conformance.scoreboard.questions import QUESTIONS, Question
from conformance.scoreboard.records import Record, Results, excuse
from conformance.targets import MissingTargetError, target, version
from conformance.targets.base import Target
from model_zoo import MissingPackageError

TIME = "time"  # measured beside the questions, where the answer is right
MEASURED = "measured"
PACKAGES = ("torch", "torchvision", "timm", "transformers", "onnx", "onnxscript", "onnxruntime", "torchlens", "numpy")


def run(
    targets: Sequence[str], programs: Sequence[str], path: Path, *, limit: float, until: float | None = None
) -> None:
    """Ask every target about every program, and append the answers; what the file has already is not asked again.

    `limit` seconds are given to each question. No new program begins after `until`, in the time of `time.monotonic`; of what is
    left of it, each target gets its share.
    """
    results = Results(path)
    results.write("facts", facts())
    for number, name in enumerate(targets):
        strikes, share = 0, None
        if until is not None:  # of the time that is left, as much as each of those that are still to come
            share = time.monotonic() + (until - time.monotonic()) / (len(targets) - number)
        while True:
            done = results.records().keys()
            left = [p for p in programs if any((stem(name), p, key) not in done for key in expected(p))]
            rest = None if share is None else share - time.monotonic()
            if left and rest is not None and rest <= 0:
                print(f"{name}: the time is up; not asked about {len(left)} models", flush=True)
            if not left or strikes > 20 or (rest is not None and rest <= 0):
                break
            if not _child(name, left, path, limit, rest):
                break
            strikes += 1


def expected(name: str) -> list[str]:
    """The keys of the questions that are asked about a program; its last one is the time."""
    changes = program(name).changes
    return [q.key for q in QUESTIONS.values() if changes or not q.changes] + [TIME]


def stem(name: str) -> str:
    """The name that a target's records bear: a file's is that of the file."""
    return Path(name).stem if name.endswith(".py") else name


def _child(name: str, programs: Sequence[str], path: Path, limit: float, rest: float | None) -> bool:
    """Run a process for a target over programs; whether another one should go on after it."""
    command = [sys.executable, "-m", "conformance.scoreboard", "child", "--target", name, "--results", str(path)]
    command += ["--limit", str(limit), *(["--seconds", str(rest)] if rest is not None else []), *programs]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONWARNINGS": "ignore", "KINETO_LOG_LEVEL": "99"})
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        now = path.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > 3 * limit + 120:  # its own alarm should have rung, and importing takes a while
            process.kill()
    if process.wait() == 0:
        return False
    results = Results(path)
    begun = [line for line in results.of("begun") if line["target"] == stem(name)]
    done = results.records()
    if not begun or (key := (stem(name), begun[-1]["program"], begun[-1]["question"])) in done:
        raise RuntimeError(f"{name}: the process ended with {process.returncode} before it asked anything")
    results.add(Record(*key, outcome=TIMEOUT, words=f"the process ended with {process.returncode}"))
    return True


def child(name: str, programs: Sequence[str], path: Path, limit: float, seconds: float | None) -> None:
    """Ask one target; this is what runs in its process."""
    results = Results(path)
    try:
        made = target(name)
    except MissingTargetError as error:
        results.write("missing", {"target": stem(name), "words": str(error)})
        print(f"missing: {error}", flush=True)
        return
    torch.set_num_threads(1)
    about = {"title": made.title, "split": made.kind, "package": made.package, "version": version(made)}
    about |= {"source": made.source, "tolerance": made.tolerance, "disclaims": dict(made.disclaims)}
    results.write("target", {"target": made.name, **about})
    begin = time.monotonic()
    for each in programs:
        if seconds is not None and time.monotonic() - begin > seconds:
            return
        try:
            ask(made, each, results, limit)
        except MissingPackageError as error:
            print(f"{made.name:22} {each} is left out: {error}", flush=True)


def ask(made: Target, name: str, results: Results, limit: float) -> None:
    """Put all questions about one program to a target, and append the answers."""
    asked = program(name)
    done = results.records().keys()
    pairs: dict[bool, Pair] = {}
    too_long = False
    for key in expected(name):
        if (made.name, name, key) in done:
            continue
        if too_long:
            results.add(Record(made.name, name, key, NOT_ASKED, "capturing took too long before"))
            continue
        results.write("begun", {"target": made.name, "program": name, "question": key})
        begin = time.monotonic()
        try:
            with alarm(limit):
                if key == TIME:
                    record = _timed(made, asked, pairs)
                else:
                    question = QUESTIONS[key]
                    found = answer(made, asked, question, pairs)
                    why = excuse(made.disclaims, asked.difficulties, key)
                    record = Record(made.name, name, key, found.outcome, found.words, why)
        except OutOfTimeError:
            pairs.clear()
            too_long = key == "captures"
            record = Record(made.name, name, key, TIMEOUT, f"no answer in {limit:g} s")
        spent = round(time.monotonic() - begin, 3)
        fields = {**vars(record), "difficulties": tuple(sorted(asked.difficulties)), "seconds": spent}
        results.add(Record(**fields))
    print(f"{made.name:22} {name}", flush=True)


def answer(made: Target, asked: Program, question: Question, pairs: dict[bool, Pair]) -> Answer:
    """A target's answer. A capture that answered rightly so far is used again; what is wrong then is asked of a new one, too."""
    known = pairs.pop(question.training, None)
    if known is not None and not question.changes and not asked.stateful:
        found = known.answer(question)
        if found.outcome in (RIGHT, ROUNDED):
            pairs[question.training] = known
        if found.outcome not in (WRONG, WARNED):
            return found
    pair = Pair(made, asked.name, question.training)
    found = pair.answer(question)
    if found.outcome in (RIGHT, ROUNDED) and not question.changes:
        pairs[question.training] = pair
    return found


def _timed(made: Target, asked: Program, pairs: dict[bool, Pair]) -> Record:
    pair = pairs.get(False)
    if pair is None:
        pair = Pair(made, asked.name)
        if pair.answer(QUESTIONS["captures"]).outcome not in (RIGHT, ROUNDED):
            return Record(made.name, asked.name, TIME, NOT_ASKED, "there is no capture that gives the example's output")
    found = attempt(pair.timed)
    if isinstance(found, Answer):
        return Record(made.name, asked.name, TIME, REFUSED, found.words)
    return Record(made.name, asked.name, TIME, MEASURED, figures={k: float(f"{v:.4g}") for k, v in found.items()})


@contextmanager
def alarm(limit: float) -> Iterator[None]:
    """Raise OutOfTimeError where the block takes longer than this many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def facts() -> dict[str, str]:
    """The day, the machine and the versions."""
    found = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
