"""A process for each target, which take turns; one that hangs or dies costs the case that it was at, and a new one goes on."""

from __future__ import annotations

import os
import platform
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
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
DONE, MISSING = "done", "missing"  # what a worker says of a program
LARGEST_KB = 1_300_000  # a worker that has held more is replaced: sixteen of them fit a machine of 24 GiB
PACKAGES = ("torch", "torchvision", "timm", "transformers", "onnx", "onnxscript", "onnxruntime", "torchlens", "numpy")


def run(
    targets: Sequence[str], programs: Sequence[str], path: Path, *, limit: float, until: float | None = None
) -> None:
    """Ask every target about every program, and append the answers; what the file has already is not asked again.

    Every target is asked about a program before the next one begins: a run that ends early is as even as a whole one. `limit`
    seconds are given to each question. No program begins after `until`, in the time of `time.monotonic`.
    """
    results = Results(path)
    results.write("facts", facts())
    done = set(results.records())
    workers = [Worker(name, path, limit) for name in targets]
    try:
        for number, each in enumerate(programs):
            if until is not None and time.monotonic() > until:
                print(f"the time is up; not asked about {len(programs) - number} models", flush=True)
                return
            for worker in workers:
                worker.ask(each, done)
            print(f"{number + 1} of {len(programs)}: {each}", flush=True)
    finally:
        for worker in workers:
            worker.end()


def expected(name: str) -> list[str]:
    """The keys of the questions that are asked about a program; its last one is the time."""
    changes = program(name).changes
    return [q.key for q in QUESTIONS.values() if changes or not q.changes] + [TIME]


def stem(name: str) -> str:
    """The name that a target's records bear: a file's is that of the file."""
    return Path(name).stem if name.endswith(".py") else name


class Worker:
    """A target's process, which takes one program after another; a new one takes its place where it died, hangs or grew large."""

    def __init__(self, name: str, path: Path, limit: float) -> None:
        self.name, self.stem, self.results, self.limit = name, stem(name), Results(path), limit
        self.process: subprocess.Popen[str] | None = None
        self.missing = False

    def ask(self, each: str, done: set[tuple[str, str, str]]) -> None:
        """Have all questions about a program answered that are not `done`; one that ends or hangs the process has no answer."""
        while not self.missing and any((self.stem, each, key) not in done for key in expected(each)):
            if self.process is None or self.process.poll() is not None:
                self.end()
                self.process = self._started()
            if self._answered(self.process, each):
                return
            code = self.process.wait()
            if code == 0:  # it had grown large
                continue
            begun = [line for line in self.results.of("begun") if line["target"] == self.stem]
            done |= self.results.records().keys()
            if not begun or (key := (self.stem, begun[-1]["program"], begun[-1]["question"])) in done:
                raise RuntimeError(f"{self.name}: the process ended with {code} before it asked anything")
            self.results.add(Record(*key, outcome=TIMEOUT, words=f"the process ended with {code}"))
            done.add(key)
            for other in expected(each) if key[2] == "captures" else ():
                if (self.stem, each, other) not in done:
                    self.results.add(Record(self.stem, each, other, NOT_ASKED, "capturing ended the process before"))
                    done.add((self.stem, each, other))

    def end(self) -> None:
        """The process ends where its input does."""
        if self.process is not None:
            with suppress(BrokenPipeError):
                self.process.communicate()
            self.process = None

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "conformance.scoreboard", "child", "--target", self.name]
        command += ["--results", str(self.results.path), "--limit", str(self.limit)]
        variables = {**os.environ, "PYTHONWARNINGS": "ignore", "KINETO_LOG_LEVEL": "99"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def _answered(self, process: subprocess.Popen[str], each: str) -> bool:
        """Hand a program to the process and wait; whether it is through with it, or its target is missing. Else it has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(each + "\n")
        patience = 6 * self.limit + 120  # its own alarm should have rung before, and importing takes a while
        size, since = -1, time.monotonic()
        while True:
            if select.select([process.stdout], [], [], 1)[0]:
                line = process.stdout.readline().strip()
                self.missing = line == MISSING
                return line in (DONE, MISSING)
            now = self.results.path.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                process.kill()


def child(name: str, path: Path, limit: float) -> None:
    """Ask one target about the programs that stdin names; this is what runs in its process."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what packages print goes elsewhere
    os.dup2(2, 1)
    results = Results(path)
    made = introduced(name, results)
    if made is None:
        answers.write(MISSING + "\n")
        return
    done = set(results.records())
    for line in sys.stdin:
        each = line.strip()
        attended(made, each, results, limit, done)
        answers.write(DONE + "\n")
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGEST_KB:
            return


def attended(made: Target, each: str, results: Results, limit: float, done: Collection[tuple[str, str, str]]) -> None:
    """Ask about a program, or say that its package is not installed and leave it out."""
    try:
        ask(made, each, results, limit, done)
    except MissingPackageError as error:
        print(f"{made.name:22} {each} is left out: {error}", flush=True)


def introduced(name: str, results: Results) -> Target | None:
    """The target, and a line that says what it is; None, and a line, where it is not installed."""
    try:
        made = target(name)
    except MissingTargetError as error:
        results.write("missing", {"target": stem(name), "words": str(error)})
        print(f"missing: {error}", flush=True)
        return None
    torch.set_num_threads(1)
    about = {"title": made.title, "split": made.kind, "package": made.package, "version": version(made)}
    about |= {"source": made.source, "tolerance": made.tolerance, "disclaims": dict(made.disclaims)}
    results.write("target", {"target": made.name, **about})
    return made


def ask(made: Target, name: str, results: Results, limit: float, done: Collection[tuple[str, str, str]] = ()) -> None:
    """Put all questions about one program to a target, but those that are `done`, and append the answers."""
    asked = program(name)
    known = Known(made, asked)
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
                    record = known.timed()
                else:
                    found = known.answer(QUESTIONS[key])
                    why = excuse(made.disclaims, asked.difficulties, key)
                    record = Record(made.name, name, key, found.outcome, found.words, why)
        except OutOfTimeError:
            known = Known(made, asked)
            too_long = key == "captures"
            record = Record(made.name, name, key, TIMEOUT, f"no answer in {limit:g} s of processor time")
        spent = round(time.monotonic() - begin, 3)
        fields = {**vars(record), "difficulties": tuple(sorted(asked.difficulties)), "seconds": spent}
        results.add(Record(**fields))


class Known:
    """What a target has captured of a program so far, in eval and in training mode."""

    def __init__(self, made: Target, asked: Program) -> None:
        self.made, self.asked = made, asked
        self.pairs: dict[bool, Pair] = {}
        self.flawless: dict[bool, bool] = {}
        self.refused: dict[bool, Answer] = {}  # the capture itself

    def answer(self, question: Question) -> Answer:
        """A capture is used again; what is wrong then, or no more right after another answer was not, is asked of a new one, too.

        A capture that was refused is not tried again.
        """
        mode = question.training
        if mode in self.refused:
            return self.refused[mode]
        if mode in self.pairs and not question.changes and not self.asked.stateful:
            found = self.pairs[mode].answer(question)
            good = found.outcome in (RIGHT, ROUNDED)
            if good or (self.flawless[mode] and found.outcome not in (WRONG, WARNED)):
                self.flawless[mode] &= good
                return found
        pair = Pair(self.made, self.asked.name, mode)
        found = pair.answer(question)
        if pair.captured is None:
            self.refused[mode] = found
        elif not question.changes:
            self.pairs[mode], self.flawless[mode] = pair, found.outcome in (RIGHT, ROUNDED)
        return found

    def timed(self) -> Record:
        """The figures, where the example's output is right."""
        name = self.made.name, self.asked.name, TIME
        pair = Pair(self.made, self.asked.name) if self.asked.stateful else self.pairs.get(False)
        if False in self.refused or pair is None or pair.answer(QUESTIONS["captures"]).outcome not in (RIGHT, ROUNDED):
            return Record(*name, NOT_ASKED, "there is no capture that gives the example's output")
        found = attempt(pair.timed)
        if isinstance(found, Answer):
            return Record(*name, REFUSED, found.words)
        return Record(*name, MEASURED, figures={k: float(f"{v:.4g}") for k, v in found.items()})


@contextmanager
def alarm(limit: float) -> Iterator[None]:
    """Raise OutOfTimeError where the block takes more seconds of processor time than this, or four times as many by the clock."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, limit), signal.SIGALRM: (signal.ITIMER_REAL, 4 * limit)}
    before = {number: signal.signal(number, ring) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def facts() -> dict[str, str]:
    """The day, the machine and the versions."""
    found = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
