"""The jobs of a fresh process: `start`, what one variant costs at first, and `rounds`, all variants side by side."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import model_zoo
from benchmarks import device, timing
from benchmarks.allocations import cuda_peak_bytes, peak_bytes
from benchmarks.resident import peak_rss
from benchmarks.sized import entry
from benchmarks.subject import NotApplicableError, Step, Subject, kept, strayed
from benchmarks.turns import alone
from benchmarks.variants import EAGER, NOISE, REFERENCE, Variant, find

ROOT = Path(__file__).resolve().parents[1]
Job = dict[str, Any]
Record = dict[str, Any]


def start(job: Job, process: Record) -> Iterator[Record]:
    """One variant from nothing: its preparation and first calls, then rounds against the model, twice, then its memory.

    The variant goes first, so that what a process pays once (thread pools, lazy libraries) is in its first call; the model's
    own first call is measured in the same way, as the start of the variant "model".
    """
    subject, variant, batch = _subject(job), find(job["variant"]), job["batches"][0]
    record = {**_key(job), "variant": variant.name, "batch": batch, "cache": job["cache"], **process}
    try:
        with _mode(subject.task):
            yield record | _started(job, subject, variant, batch, process["rss_bytes"])
    except Exception as error:
        yield record | failure(error)


def _started(job: Job, subject: Subject, variant: Variant, batch: int, rss: dict[str, int]) -> Record:
    args, kwargs = subject.inputs(batch)
    subject.build_ahead()
    rss = rss | {"ready": peak_rss()}
    if subject.device.startswith("cuda"):
        torch.zeros(1, device=subject.device)  # the context is no variant's cost
    graphs = [_graphs()]
    built: list[Step] = []
    prepare = timing.seconds(
        lambda: built.append(_build(variant.name, subject, batch)), timing.synchroniser(subject.device)
    )
    rss["prepared"] = peak_rss()
    run = partial(built[0], args, kwargs)
    graphs.append(_graphs())
    first = []
    for _ in range(job["settle"]):
        first += timing.calls(run, 1, subject.device)
        graphs.append(_graphs())
    rss["called"] = peak_rss()
    # The variant has to be built first, since its first call is what is measured. What is built last pays page faults that the
    # others do not (see overhead.py): the model and its copy take turns at that, so that their pair's floor holds the effect.
    runs: dict[str, Callable[[], Any]] = {variant.name: run}
    for name in (EAGER, NOISE) if job["process"] % 2 == 0 else (NOISE, EAGER):
        if name != variant.name:
            runs[name] = partial(_build(name, subject, batch), args, kwargs)
            timing.calls(runs[name], job["settle"], subject.device)
    seconds = timing.rounds(runs, job["pairs"], _order(job), subject.device)
    return {
        "status": "ok",
        "prepare_seconds": prepare,
        "calls_seconds": first,
        "graphs": graphs,
        "graphs_in_rounds": _graphs() - graphs[-1],
        "seconds": seconds,
        **_cuda_graphs(subject),
        "rss_bytes": rss,
        "tensor_peak_bytes": cuda_peak_bytes(run) if subject.device.startswith("cuda") else peak_bytes(run),
    }


def side_by_side(job: Job, process: Record) -> Iterator[Record]:
    """All variants and the model twice, in rounds of random order, at each batch; one record per batch and variant.

    They are built in an order of the process, since where a variant lies in memory has its price. Outputs are compared with the
    model's at first, and once more after the rounds. What raises at one batch, in the rounds too, is tried again at the next, and
    leaves the others as they are.
    """
    subject = _subject(job)
    names = [EAGER, NOISE, *(v for v in job["variants"] if v not in (EAGER, NOISE))]
    shuffled = random.Random(f"build {_seed(job, job['batches'][0])}").sample(names, len(names))
    built: dict[str, Step] = {}
    failed: dict[str, Record] = {}
    graphs: dict[str, dict[int, int]] = {name: {} for name in names}
    with _mode(subject.task):
        for batch in job["batches"]:
            args, kwargs = subject.inputs(batch)
            first: dict[str, Any] = {}
            for name in shuffled:
                variant = _variant(name)
                failed.pop(name, None)
                before = _graphs()
                try:
                    if name not in built or variant.each_batch:
                        built[name] = _build(name, subject, batch)
                    first[name] = kept(built[name](args, kwargs))
                    timing.calls(partial(built[name], args, kwargs), job["settle"], subject.device)
                    graphs[name][batch] = _graphs() - before
                except Exception as error:
                    failed[name] = failure(error)
                    try:
                        device.hold_alive(subject.device, error)
                    except device.LostDeviceError:
                        yield {**_key(job), "variant": name, "batch": batch, "seed": _seed(job, batch), **failed[name]}
                        raise
            runs = {name: partial(built[name], args, kwargs) for name in names if name not in failed}
            apart = {name: strayed(first[EAGER], first[name]) for name in runs} if EAGER in runs else {}
            first.clear()
            before = _graphs()
            times: dict[str, list[float]] = {}
            while EAGER in runs and not times:
                try:
                    with alone(job.get("turn")):
                        for name, run in runs.items():
                            _warm(name, run, subject.device)
                        times = timing.rounds(runs, job["pairs"], _order(job, batch), subject.device)
                    expected = kept(runs[EAGER]())
                    apart |= {name: max(apart[name], _last(name, run, expected)) for name, run in runs.items()}
                except timing.RoundError as error:
                    times = {}
                    failed[error.name] = failure(error)
                    device.hold_alive(subject.device, error)
                    del runs[error.name]
            in_rounds = _graphs() - before
            for name in names:
                record = {**_key(job), "variant": name, "batch": batch, "seed": _seed(job, batch)}
                if name in times:
                    record |= {"status": "ok", "strayed": _number(apart[name]), "graphs": graphs[name][batch]}
                    record |= {"graphs_in_rounds": in_rounds, "seconds": times[name]} | _cuda_graphs(subject)
                else:
                    record |= failed.get(name) or {"status": "failed", "reason": f"{EAGER} failed"}
                yield record


def _warm(name: str, run: Callable[[], Any], at: str) -> None:
    """A few calls before what counts, since others may have run in between; raises `RoundError` from what it raises."""
    try:
        timing.calls(run, 2, at)
    except Exception as error:
        raise timing.RoundError(name) from error


def _last(name: str, run: Callable[[], Any], expected: Any) -> float:
    """How far the result of one more call has strayed from the model's; raises `RoundError` from what it raises."""
    if name == EAGER:
        return 0.0
    try:
        return strayed(expected, run())
    except Exception as error:
        raise timing.RoundError(name) from error


def _equality(job: Job, process: Record) -> Iterator[Record]:
    yield from importlib.import_module("benchmarks.equality").equality(job, process)


def _parts(job: Job, process: Record) -> Iterator[Record]:
    yield from importlib.import_module("benchmarks.parts").parts(job, process)


JOBS = {"start": start, "rounds": side_by_side, "reference": side_by_side, "equality": _equality, "parts": _parts}


def failure(error: Exception) -> Record:
    """What a record holds of an exception: a failure is a result, and is published as one."""
    if isinstance(error, timing.RoundError) and isinstance(error.__cause__, Exception):
        return failure(error.__cause__)
    words = str(error).strip().split("\n")[0][:300]
    kind = "not applicable" if isinstance(error, NotApplicableError) else "failed"
    if isinstance(error, model_zoo.MissingPackageError):
        kind = "absent"
    return {"status": kind, "reason": f"{type(error).__name__}: {words}"}


def _key(job: Job) -> Record:
    return {name: job[name] for name in ("job", "task", "device", "model", "process")}


def _subject(job: Job) -> Subject:
    device.fix(job["device"])
    cache = Path(job["packages"]) if job.get("packages") else None
    return Subject(entry(job["model"]), job["device"], job["task"], cache)


def _cuda_graphs(subject: Subject) -> Record:
    found = device.cuda_graphs(subject.device)
    if found is None:
        return {}
    splits = sys.modules.get("benchmarks.splits")
    ours = splits.graphs_recorded() if splits is not None else 0
    return {"cuda_graphs": found | {"recorded": found["recorded"] + ours}}


def _variant(name: str) -> Variant:
    return find(EAGER if name == NOISE else name)


def _build(name: str, subject: Subject, batch: int) -> Step:
    variant = _variant(name)
    if name == REFERENCE:
        _require_reference()
    module, _, function = variant.builder.partition(":")
    with torch.enable_grad():  # as people prepare and export; the reference refuses to under no_grad
        step: Step = getattr(importlib.import_module(module), function)(subject, batch, **variant.options)
    return step


def _require_reference() -> None:
    file = Path(sys.modules["ariadne"].__file__ or "").resolve()
    if file.is_relative_to(ROOT):
        raise RuntimeError(f"ariadne was imported from {file.parent}, which is not the package from PyPI")


@contextlib.contextmanager
def _mode(task: str) -> Iterator[None]:
    with torch.set_grad_enabled(task == "training"):
        yield


def _graphs() -> int:
    """How many graphs Dynamo has compiled in this process so far, and packages AOTInductor."""
    utils, splits = (sys.modules.get(name) for name in ("torch._dynamo.utils", "benchmarks.splits"))
    graphs = int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
    return graphs + (splits.packages_compiled() if splits is not None else 0)


def _seed(job: Job, batch: int) -> str:
    return json.dumps([job["task"], job["model"], batch, job["process"]])


def _order(job: Job, batch: int | None = None) -> random.Random:
    return random.Random(_seed(job, job["batches"][0] if batch is None else batch))


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
