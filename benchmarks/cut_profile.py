"""Bytes and time along the position of the cut: `python -m benchmarks.cut_profile MODEL… --output FILE`.

One sample for each cut of a model's plan: position, op counts, bytes per sample across it, and why it is unsafe where it is.
At most `--cuts` safe cuts, evenly placed, and the one that "auto" chooses are measured: the plan is cut there, and prefix,
suffix and the whole model run in rounds of random order in one process, all raw times kept. One process gives no interval:
read the shape, and compare speeds by `python -m benchmarks run`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import model_zoo
from ariadne import prepare_split
from ariadne.cut import SplitCandidate
from ariadne.runtime import SplitRuntime
from benchmarks import environment, timing
from benchmarks.jobs import failure
from benchmarks.models import SETS, meant
from benchmarks.records import Record, append
from benchmarks.subject import EXAMPLE_BATCH, Subject


def evenly(safe: Sequence[SplitCandidate], count: int) -> list[SplitCandidate]:
    """At most `count` of them, evenly placed from the first to the last."""
    if len(safe) <= count:
        return list(safe)
    return [safe[round(i * (len(safe) - 1) / max(1, count - 1))] for i in range(count)]


def profile(name: str, device: str, batch: int, cuts: int, pairs: int, settle: int) -> list[Record]:
    """The samples of one model; a single one that says why where it can't be split."""
    head = {"job": "cuts", "task": "inference", "device": device, "model": name, "batch": batch, "process": 0}
    try:
        subject = Subject(model_zoo.entry(name), device, "inference")
        args, kwargs = subject.inputs(EXAMPLE_BATCH)
        model = subject.model()
        runtime = prepare_split(model, args, example_kwargs=kwargs, split="auto")
        chosen = {c.cut: c for c in evenly([c for c in runtime.candidates if c.safe], cuts)}
        chosen[runtime.candidate.cut] = runtime.candidate
        times = _measured(runtime, [chosen[cut] for cut in sorted(chosen)], subject, model, batch, pairs, settle)
    except Exception as error:
        return [{**head, "variant": "auto", **failure(error)}]
    return [
        {**head, "variant": c.split_id, "status": "ok", "seconds": times.get(c.cut), **_facts(c, runtime)}
        for c in runtime.candidates
    ]


def _facts(c: SplitCandidate, runtime: SplitRuntime) -> Record:
    return {
        "cut": c.cut,
        "after": c.after,
        "boundary_bytes": c.boundary_bytes,
        "values": len(c.live),
        "prefix_ops": c.prefix_ops,
        "suffix_ops": c.suffix_ops,
        "unsafe": c.reason,
        "auto": c.cut == runtime.candidate.cut,
    }


def _measured(
    runtime: SplitRuntime, chosen: Sequence[SplitCandidate], subject: Subject, model: Any, batch: int, pairs: int, settle: int
) -> dict[int, dict[str, list[float]]]:  # fmt: skip
    """For each chosen cut, the seconds of prefix, suffix and model, of the same rounds."""
    args, kwargs = subject.inputs(batch)
    runs: dict[str, Callable[[], Any]] = {"model": partial(model, *args, **kwargs)}
    with torch.no_grad():
        for c in chosen:
            split = runtime.resplit(c)
            runs[f"prefix {c.cut}"] = partial(split.run_prefix, *args, **kwargs)
            runs[f"suffix {c.cut}"] = partial(split.run_suffix, split.run_prefix(*args, **kwargs))
        for run in runs.values():
            timing.calls(run, settle, subject.device)
        times = timing.rounds(runs, pairs, random.Random(f"cuts {subject.entry.name}"), subject.device)
    return {
        c.cut: {side: times[f"{side} {c.cut}"] for side in ("prefix", "suffix")} | {"model": times["model"]}
        for c in chosen
    }


def main(argv: list[str] | None = None) -> int:
    """Profile each model; returns 1 where one could not be."""
    parser = argparse.ArgumentParser("python -m benchmarks.cut_profile", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help=f"names of the zoo, or sets: {', '.join(SETS)}")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=12, help="safe cuts that are timed, besides the automatic one (12)")
    parser.add_argument("--pairs", type=int, default=30, help="rounds (30)")
    parser.add_argument("--settle", type=int, default=5, help="calls before them (5)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(argv)
    try:
        models = meant(given.models)
    except model_zoo.UnknownNameError as error:
        parser.error(str(error))
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("CUDA was asked for, and torch finds no CUDA device; measure with --device cpu, or elsewhere")
    torch.set_num_threads(given.threads)
    here = environment.here(given.device, {"pairs": given.pairs, "settle": given.settle, "threads": given.threads})
    append(given.output, [here])
    failed = 0
    for name in models:
        moment = environment.moment()
        samples = profile(name, given.device, given.batch, given.cuts, given.pairs, given.settle)
        append(given.output, [{"environment": here.id, **moment, **s} for s in samples])
        bad = [s["reason"] for s in samples if s["status"] != "ok"]
        failed += bool(bad)
        timed = sum(s.get("seconds") is not None for s in samples)
        print(f"{name}: {bad[0] if bad else f'{len(samples)} cuts, {timed} of them timed'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
