"""The runner: fresh processes, one after another, whose samples are appended to a file; what is there is not run again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.records import Record, append, key, read
from benchmarks.turns import Turns
from benchmarks.variants import EAGER, NOISE, REFERENCE, Variant, find
from conformance.suite.environment import Environment

ROOT = Path(__file__).resolve().parents[1]
DIED = ("crashed", "timed out")
LEAST = 5.0  # seconds under which no unit is begun
OFFLINE = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Options:
    """What to measure, and how much of it.

    `by_place`: all processes of one model before the next model, so that a run that is cut off has whole places. `until`: the
    moment of `time.monotonic()` after which nothing is begun, and at which what runs is ended. `cache`: where what the rounds
    compile is kept for the next run; a folder of this run's own where none is named. `abreast`: how many processes run at once;
    their rounds are measured one after another all the same, and with the others stopped (see `turns`).
    """

    models: tuple[str, ...]
    batches: tuple[int, ...] = (1,)
    variants: tuple[str, ...] = (EAGER,)
    tasks: tuple[str, ...] = ("inference",)
    device: str = "cpu"
    processes: int = 5
    start_processes: int = 5
    start_batches: tuple[int, ...] = ()
    pairs: int = 30
    settle: int = 10
    threads: int = 1
    timeout: float = 1800.0
    reference: str | None = None
    by_place: bool = False
    until: float | None = None
    cache: Path | None = None
    abreast: int = 1

    @property
    def fixed(self) -> dict[str, Any]:
        """The options that a sample's meaning depends on; the others may differ between a run and its continuation."""
        return {"pairs": self.pairs, "settle": self.settle, "threads": self.threads}


@dataclass(frozen=True)
class Unit:
    """A job, or two that share a compile cache: `caches` are its states, each a process of its own."""

    job: str
    task: str
    model: str
    batches: tuple[int, ...]
    variants: tuple[str, ...]
    process: int
    caches: tuple[str | None, ...] = (None,)
    refusal: str | None = None

    @property
    def words(self) -> str:
        """How it is called while it runs."""
        what = self.variants[0] if self.job == "start" else f"{len(self.variants)} variants"
        batches = ", ".join(map(str, self.batches))
        return f"{self.job} {self.task} {self.model}, batch {batches}, {what}, process {self.process}"

    def samples(self, device: str, cache: str | None) -> Iterator[Record]:
        """The samples that it owes, without their results."""
        for batch in self.batches:
            for variant in self.variants:
                sample = {"job": self.job, "task": self.task, "device": device, "model": self.model}
                sample |= {"batch": batch, "variant": variant, "process": self.process}
                yield sample | ({"cache": cache} if self.job == "start" else {})


def units(options: Options) -> Iterator[Unit]:
    """All units in the order in which they run: process by process, so that what drifts with time is in all alike.

    Or, `by_place`, model by model, so that what there is after a while has all its processes.
    """
    chosen = [find(name) for name in options.variants]
    processes = range(max(options.processes, options.start_processes))
    places = [(task, model) for task in options.tasks for model in options.models]
    order = (
        [(process, *place) for place in places for process in processes]
        if options.by_place
        else [(process, *place) for process in processes for place in places]
    )
    for process, task, model in order:
        if process < options.start_processes:
            yield from _starts(options, chosen, task, model, process)
        if process < options.processes:
            yield from _rounds(options, chosen, task, model, process)


def _starts(options: Options, chosen: Sequence[Variant], task: str, model: str, process: int) -> Iterator[Unit]:
    able = [v for v in chosen if v.start and v.refusal(task, options.device) is None]
    if options.reference is None:
        able = [v for v in able if v.name != REFERENCE]
    if able and find(EAGER) not in able:
        able.append(find(EAGER))  # cost X is beyond that of the model itself
    random.Random(f"{model} {process}").shuffle(able)
    for batch in options.start_batches or options.batches:
        for variant in able:
            caches = ("cold", "warm") if variant.caches else ("none",)
            yield Unit("start", task, model, (batch,), (variant.name,), process, caches)


def _rounds(options: Options, chosen: Sequence[Variant], task: str, model: str, process: int) -> Iterator[Unit]:
    def unit(job: str, names: Sequence[str], refusal: str | None = None) -> Unit:
        return Unit(job, task, model, options.batches, tuple(names), process, refusal=refusal)

    refused = {v.name: why for v in chosen if (why := v.refusal(task, options.device)) is not None}
    yield unit("rounds", [EAGER, NOISE, *(v.name for v in chosen if v.name not in (EAGER, REFERENCE, *refused))])
    for name, why in refused.items():
        yield unit("rounds", [name], why)
    if any(v.name == REFERENCE for v in chosen) and REFERENCE not in refused:
        if options.reference is None:
            yield unit("reference", [REFERENCE], "no environment with ariadne-split was given (--reference)")
        else:
            yield unit("reference", [EAGER, NOISE, REFERENCE])


@dataclass
class Runner:
    """Runs the units of some options into a file; `progress` is told each unit and what it came to."""

    options: Options
    output: Path
    progress: Callable[[str], None]
    reference: Path | None = None
    done: dict[Any, Record] = field(default_factory=dict)
    out_of_time: bool = False
    turns: Turns = field(default_factory=Turns)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> int:
        """Run what the file does not hold yet; returns how many samples failed."""
        here = self._here()
        if self.options.reference is not None:
            self.reference = reference_folder(self.options.reference)
        version = reference_version(self.reference) if self.reference is not None else None
        if self.output.exists():
            held = read(self.output)
            mine = {k: s for k, s in held.samples.items() if s["environment"] == here.id}
            self.done = {k: s for k, s in mine.items() if version in (s.get("reference", version), None)}
            known = here.id in held.environments
        else:
            known = False
        if not known:
            append(self.output, [here])
        start = time.perf_counter()
        ran: list[Unit] = []
        with tempfile.TemporaryDirectory(prefix="ariadne-benchmarks-") as folder:
            for _ in range(
                2
            ):  # what was left out since a process died, earlier, is owed where that process has run since
                todo = [
                    u
                    for u in units(self.options)
                    if not self._is_done(u, here) and not (u in ran and self._ended(u, here))
                ]
                self._run(todo, here, start, Path(folder), version)
                ran += todo
        return failed_or_died(self.done.values())

    def _run(self, todo: Sequence[Unit], here: Environment, start: float, folder: Path, version: str | None) -> None:
        def one(number: int, unit: Unit) -> None:
            if self._left() < LEAST:
                self.out_of_time = True
                return
            head = f"[{number}/{len(todo)} {time.perf_counter() - start:5.0f} s] {unit.words}"
            self.progress(f"{head} …")
            before, moment = time.perf_counter(), environment.moment()
            if REFERENCE in unit.variants and unit.refusal is None:
                moment |= {"reference": version}
            if self.options.abreast > 1:
                moment |= {"abreast": self.options.abreast}
            samples = list(self._perform(self._widened(unit), folder))
            if self._left() <= 0:  # ended by the clock of the whole run, which says nothing of this unit
                self.out_of_time = True
                return
            samples = [{"environment": here.id, **moment, **s} for s in samples]
            with self.writing:
                self._check_unchanged(here)
                append(self.output, samples)
                self.done |= {key(s): s for s in samples}
            bad = [f"{s['variant']}: {s['status']}: {s['reason']}" for s in samples if s["status"] != "ok"]
            self.progress("; ".join([f"{head}: {time.perf_counter() - before:.1f} s", *bad]))

        if self.options.abreast == 1:
            for number, unit in enumerate(todo, start=1):
                one(number, unit)
        else:
            with ThreadPoolExecutor(self.options.abreast) as pool:
                list(pool.map(one, range(1, len(todo) + 1), todo))

    def _left(self) -> float:
        """The seconds that are left."""
        return math.inf if self.options.until is None else self.options.until - time.monotonic()

    def alone(self, job: str, model: str, folder: Path, limit: float, **more: Any) -> list[Record]:
        """The records of a job about one model, in a process of its own that may take so many seconds."""
        records = folder / "records.jsonl"
        asked = {"job": job, "device": self.options.device, "model": model, "imports": ["torch", "ariadne"], **more}
        status, reason = self._start(asked, records, self._environ(folder, False), limit)
        found = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
        told = {r["task"] for r in found}
        base = {"model": model, "device": self.options.device, "status": status, "reason": reason}
        return found + [base | {"task": task} for task in ("inference", "training") if task not in told]

    def _here(self) -> Environment:
        return environment.here(self.options.device, self.options.fixed, self._variables())

    def _check_unchanged(self, here: Environment) -> None:
        """ValueError where the code, or what else processes import and run on, is no more what it was at the beginning."""
        now = self._here()
        if now.id != here.id:
            names = sorted(n for n in here.facts.keys() | now.facts.keys() if here.facts.get(n) != now.facts.get(n))
            told = "; ".join(f"{n} {here.facts.get(n, 'none')} → {now.facts.get(n, 'none')}" for n in names)
            raise ValueError(
                f"the environment changed while this was measured: {told}. The last job is left out; start again to measure "
                "everything anew, or change back and continue"
            )

    def _is_done(self, unit: Unit, here: Environment) -> bool:
        """Whether all of its samples are there; those of a process that died, or left out for one that runs now, are owed anew."""
        found = self._found(unit, here)
        died = self._died(unit) if unit.job != "start" else {}
        return all(
            s is not None and s["status"] not in DIED and (not s.get("left_out") or s["variant"] in died) for s in found
        )

    def _ended(self, unit: Unit, here: Environment) -> bool:
        """Whether its own process died."""
        return any(s is not None and s["status"] in DIED for s in self._found(unit, here))

    def _found(self, unit: Unit, here: Environment) -> list[Record | None]:
        """What there is of each sample that it owes."""
        owed = [s for cache in unit.caches for s in unit.samples(self.options.device, cache)]
        return [self.done.get(key({"environment": here.id, **s})) for s in owed]

    def _widened(self, unit: Unit) -> Unit:
        """The unit with all variants that were measured in its place, which can't be held against another process's model."""
        if unit.job != "rounds" or unit.refusal is not None:
            return unit
        held = [
            s["variant"]
            for s in list(self.done.values())
            if (s["job"], s["task"], s["model"], s["process"]) == (unit.job, unit.task, unit.model, unit.process)
            and s["batch"] in unit.batches
            and s["status"] == "ok"
        ]
        return replace(unit, variants=tuple(dict.fromkeys([*unit.variants, *held])))

    def _perform(self, unit: Unit, folder: Path) -> Iterator[Record]:
        if unit.refusal is not None:
            status = "absent" if unit.job == "reference" else "not applicable"
            for sample in unit.samples(self.options.device, None):
                yield sample | {"status": status, "reason": unit.refusal}
            return
        left_out = self._died(unit) if unit.job != "start" else {}
        if unit.job == "start":
            kept = Path(tempfile.mkdtemp(dir=folder))  # cold: nobody has used it; warm: only the cold one has
        else:
            kept = (self.options.cache or folder) / f"kept-{unit.job}"
        refused: tuple[str, str] | None = None
        for cache in unit.caches:
            if refused is not None:
                for sample in unit.samples(self.options.device, cache):
                    yield sample | {"status": refused[0], "reason": refused[1]}
                continue
            samples = list(self._child(unit, cache, kept, left_out))
            yield from samples
            refused = next((_refused(cache, s) for s in samples if unit.job == "start" and s["status"] != "ok"), None)
        if unit.job == "start":  # what it compiled serves the rounds, in which compiling is not measured
            shutil.copytree(
                kept,
                (self.options.cache or folder) / "kept-rounds",
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("records-*"),
            )
            shutil.rmtree(kept, ignore_errors=True)

    def _died(self, unit: Unit) -> dict[str, dict[int, str]]:
        """The variants whose own process died, which would take the others with them, and the words for each such batch."""
        found: dict[str, dict[int, str]] = {}
        for sample in list(self.done.values()):
            same = (sample["task"], sample["model"]) == (unit.task, unit.model)
            if same and sample["job"] == "start" and sample["status"] in DIED:
                words = f"left out: its own process {sample['status']}: {sample['reason']}"
                found.setdefault(sample["variant"], {})[sample["batch"]] = words
        return found

    def _child(
        self, unit: Unit, cache: str | None, kept: Path, left_out: Mapping[str, Mapping[int, str]]
    ) -> Iterator[Record]:
        names = [name for name in unit.variants if name not in left_out]
        job: dict[str, Any] = {"job": unit.job, "task": unit.task, "device": self.options.device}
        job |= {"model": unit.model, "batches": unit.batches, "process": unit.process, "cache": cache}
        job |= {"pairs": self.options.pairs, "settle": self.options.settle, "packages": str(kept / "packages")}
        imports = {i: None for name in names if name != NOISE for i in find(name).imports}
        job |= {"variants": names, "variant": names[0], "imports": list(imports)}
        records = kept / f"records-{time.monotonic_ns()}.jsonl"
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, reason = self._start(job, records, self._environ(kept, REFERENCE in unit.variants))
        found = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
        by_key = {key(s): s for s in found}
        for sample in unit.samples(self.options.device, cache):
            if sample["variant"] in left_out:
                yield sample | _left_out(left_out[sample["variant"]], sample["batch"])
            else:
                yield by_key.get(key(sample)) or sample | {"status": status, "reason": reason}

    def _start(
        self, job: dict[str, Any], records: Path, environ: Mapping[str, str], limit: float | None = None
    ) -> tuple[str, str]:
        """Run a job to its end; for the samples that it did not give, what became of it."""
        limit = max(0.0, min(self.options.timeout if limit is None else limit, self._left()))
        mine, theirs = socket.socketpair()
        asked = job | ({"turn": theirs.fileno()} if self.options.abreast > 1 else {})
        command = [sys.executable, "-m", "benchmarks.child", json.dumps(asked), str(records)]
        with mine, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            with theirs:
                child = self.turns.begin(
                    lambda: subprocess.Popen(
                        command, env=dict(environ), stdout=errors, stderr=errors, cwd=records.parent,
                        start_new_session=True, pass_fds=[theirs.fileno()], text=True,
                    )
                )  # fmt: skip
            try:
                code = self.turns.wait(child, mine, limit)
            except subprocess.TimeoutExpired:
                return "timed out", f"after {limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # its compile workers, too
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            errors.seek(0)
            lines = errors.read().strip().splitlines()
        return "crashed", f"exit status {code}: {lines[-1][:300] if lines else 'no message'}"

    def _environ(self, kept: Path, reference: bool) -> dict[str, str]:
        first = [str(self.reference)] if reference and self.reference is not None else []
        return {
            **self._variables(),
            "PYTHONPATH": os.pathsep.join([*first, str(ROOT), *brought()]),
            "PYTHONSAFEPATH": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"),
            "TRITON_CACHE_DIR": str(kept / "triton"),
            "ARIADNE_CACHE_DIR": str(kept / "ariadne"),
        }

    def _variables(self) -> dict[str, str]:
        """What all processes get, wherever they look for code and caches."""
        threads = str(self.options.threads)
        return {**os.environ, **OFFLINE, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def brought() -> list[str]:
    """The folders of packages that this process was given by PYTHONPATH: its children import the same."""
    found = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [path for path in map(os.path.abspath, found) if Path(path) != ROOT]


def failed_or_died(records: Iterable[Mapping[str, Any]]) -> int:
    """How many of these came to nothing."""
    return sum(r["status"] in ("failed", *DIED) for r in records)


def _left_out(died: Mapping[int, str], batch: int) -> Record:
    """Status and reason of a variant whose own process died at these batches: failed there, not tried elsewhere."""
    if batch in died:
        return {"status": "failed", "reason": died[batch], "left_out": True}
    at, words = next(iter(died.items()))
    reason = f"not tried at this batch, for at batch {at} it was {words}"
    return {"status": "absent", "reason": reason, "left_out": True}


def _refused(cache: str | None, sample: Record) -> tuple[str, str]:
    """Status and reason of a start that would go on from the cache of this one, which came to nothing."""
    status = "failed" if sample["status"] in ("failed", *DIED) else sample["status"]
    return status, f"left out: the {cache} process {sample['status']}: {sample['reason']}"


def reference_folder(given: str) -> Path:
    """The folder that holds the reference package: given as itself, or as the Python of the environment that has it.

    The folder goes first on the import path; torch and the zoo are this environment's, so that both run the same kernels.
    """
    path = Path(given)
    if path.is_dir():
        found = path
    else:
        code = "from importlib.metadata import distribution as d; print(d('ariadne-split').locate_file(''))"
        try:
            done = subprocess.run([given, "-I", "-c", code], capture_output=True, text=True)
        except OSError as error:
            raise ValueError(f"the reference is neither a folder nor a Python that can be started: {error}") from error
        if done.returncode != 0:
            raise ValueError(f"{given} has no package ariadne-split: {done.stderr.strip().splitlines()[-1]}")
        found = Path(done.stdout.strip())
    if not (found / "ariadne").is_dir() or not list(found.glob("ariadne_split-*.dist-info")):
        raise ValueError(f"{found} does not hold the package ariadne-split; make it with pip install --target")
    return found.resolve()


def reference_version(folder: Path) -> str:
    """The version of the reference package, from the name of its metadata."""
    (found,) = folder.glob("ariadne_split-*.dist-info")
    return found.name.removeprefix("ariadne_split-").removesuffix(".dist-info")
