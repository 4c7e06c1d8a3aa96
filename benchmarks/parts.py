"""Where the time of a split's call goes: its ops, and what a call costs beside them; asked where a split is the slower one."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.boundary import BoundaryPayload
from benchmarks import timing
from benchmarks.device import fix
from benchmarks.sized import entry
from benchmarks.subject import EXAMPLE_BATCH, LARGEST_BATCH, Subject

PAIRS = 100
MODEL, SPLIT, OPS, CHECKS = "model", "split", "ops", "checks"


def parts(job: dict[str, Any], process: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One record: seconds of the model's call, of the split's, of its ops alone and of its checks, taken in the same rounds."""
    fix(job["device"])
    batch = job["batches"][0]
    record = {name: job[name] for name in ("job", "device", "model")} | {"task": "inference", "variant": "generated"}
    record |= {"batch": batch, "process": 0}
    try:
        with torch.no_grad():
            runs = _runs(Subject(entry(job["model"]), job["device"], "inference"), batch)
            for run in runs.values():
                timing.calls(run, 10, job["device"])
            seconds = timing.rounds(runs, PAIRS, random.Random(job["model"]), job["device"])
        yield record | {"status": "ok", "seconds": seconds}
    except Exception as error:  # as in every job, a failure is a result
        words = str(error).strip().split("\n")[0][:300]
        yield record | {"status": "failed", "reason": f"{type(error).__name__}: {words}"}


def _runs(subject: Subject, batch: int) -> dict[str, Callable[[], Any]]:
    """What is timed. The split runs the model's copy, as in the benchmarks."""
    model = subject.model()
    args, kwargs = subject.inputs(EXAMPLE_BATCH)
    spec = SplitSpec("percent:50", dynamic_batch=(1, LARGEST_BATCH), trace_batch_mode="batch_gt1")
    with torch.enable_grad():
        runtime = prepare_split(subject.model(), args, split=spec, example_kwargs=kwargs)
    args, kwargs = subject.inputs(batch)
    runs: dict[str, Callable[[], Any]] = {
        MODEL: lambda: model(*args, **kwargs),
        SPLIT: lambda: runtime.run_suffix(runtime.run_prefix(*args, **kwargs)),
    }
    if not isinstance(runtime, SplitRuntime):
        return runs  # the model's own Python runs there
    runs[SPLIT]()  # a batch of one may take a plan of its own
    variant = runtime._now[False]
    entered = variant.enter(args, kwargs)
    if entered is None:
        raise RuntimeError("no plan of the split serves these inputs by itself")
    boundary = runtime.run_prefix(*args, **kwargs)

    def checks() -> None:
        variant.enter(args, kwargs)
        variant.prefix_guard()
        made = BoundaryPayload(variant.key[1], variant.key[0], entered[0], variant.candidate.live, boundary.raw)
        made._moves = variant.flight.moves
        runtime.accept(made)
        variant.check_suffix(boundary)

    runs[OPS] = lambda: variant.suffix(entered[0], *variant.prefix(*entered))
    runs[CHECKS] = checks
    return runs


def cause(seconds: Mapping[str, list[float]]) -> str:
    """In words, where the time goes by which a split's call is slower than its model's."""
    model, split = (statistics.median(seconds[name]) for name in (MODEL, SPLIT))
    if split <= model:
        return f"not so when it was profiled ({split / model:.2f})"
    if OPS not in seconds:
        return "the model's own Python runs, since no graph holds: it is stopped at the cut, and goes on from there"
    ops, checks = (statistics.median(seconds[name]) for name in (OPS, CHECKS))
    times = f"its ops take {_time(ops)} and its checks {_time(checks)}, where the model takes {_time(model)}"
    if ops - model >= (split - model) / 2:
        return f"the ops: {times}"
    if checks >= (split - model) / 2:
        return f"what is checked at each call: {times}"
    return f"what a call costs beside checks and ops, such as state that is put back: {times}, and the split {_time(split)}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
