"""One command for a device that is at hand for half an hour: `python -m benchmarks cuda --minutes 28 --output FOLDER`.

What is worth most is measured first: equality of split and whole; replay at batch 1; what compiling costs and when it has paid
back; training at 32; batch 256. Processes compile side by side, and measure alone. The same command goes on where it was cut
off: what the folder holds is not run again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.models import SETS
from benchmarks.records import Record
from benchmarks.runner import Options, Runner, failed_or_died
from benchmarks.variants import EAGER, find

REPLAY = ("model", "compile", "reduce-overhead", "default", "reduce-overhead-fixed", "graphs")
COMPILED = ("model", "compile", "generated", "compiled", "fixed")
STARTS = ("model", "compile", "generated", "compiled", "reduce-overhead-fixed")
STEPS = ("equality", "compiling", "replay", "starts", "training", "batches")
LEAST = 10.0  # seconds under which no process is begun


@dataclass(frozen=True)
class Step:
    """A part of the campaign: what it answers, and how it is measured (None: by comparing), into which file."""

    name: str
    about: str
    options: Options | None = None
    file: str = "benchmarks.jsonl"


def steps(models: tuple[str, ...], device: str, small: bool, cache: Path | None = None) -> tuple[Step, ...]:
    """The parts in order of their value. The models at people's sizes are replayed at batch 1 and started; the zoo's do all."""
    many, train, threads = (4, 2, 1) if small else (256, 32, 4)
    zoo = tuple(m for m in models if m not in SETS["sized"])
    base = Options(
        models, (1,), _names(REPLAY), device=device, processes=1 if small else 5, start_processes=0, threads=threads,
        pairs=4 if small else 20, settle=2 if small else 10, abreast=abreast(), cache=cache,
    )  # fmt: skip
    starts = replace(
        base, models=models[:4], variants=_names(STARTS), processes=0, start_processes=1, abreast=min(4, abreast())
    )
    return (
        Step("equality", "whether split equals whole, in replay and in training"),
        Step("compiling", "once, what the rounds run: nothing is measured here",
             replace(base, processes=1, pairs=1, settle=1), "compiling.jsonl"),
        Step("replay", "replay at batch 1", base),
        Step("starts", "what compiling costs, and when it has paid back", starts),
        Step("training", f"training at batch {train}",
             replace(base, models=zoo, batches=(train,), tasks=("training",), variants=_names(COMPILED))),
        Step("batches", f"replay at batch {many}",
             replace(base, models=zoo, batches=(many,), variants=_names(COMPILED))),
    )  # fmt: skip


def abreast() -> int:
    """How many processes are at work at once: half of the cores, since each compiles with some threads of its own."""
    return max(1, (os.cpu_count() or 1) // 2)


def _names(short: Iterable[str]) -> tuple[str, ...]:
    return tuple(find(v).name for v in short)


def run(
    models: tuple[str, ...], device: str, minutes: float, folder: Path, small: bool, progress: Callable[[str], None],
    only: Collection[str] = (), cache: Path | None = None,
) -> int:  # fmt: skip
    """Run what the folder does not hold yet, until the time is up; returns how many results are failures.

    `only`: the names of the steps to run, all where none is named. `cache`: where what the rounds compile is kept. `folder` gets
    `equality.jsonl`, `benchmarks.jsonl` and `steps.jsonl`, which says of each part whether it was ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until, failed = time.monotonic() + 60 * minutes, 0
    for step in steps(models, device, small, (cache or folder / "cache").absolute()):
        if only and step.name not in only:
            continue
        left = until - time.monotonic()
        if left < LEAST:
            progress(f"{step.name}: no time is left for {step.about}")
            _note(folder, step, ended=False, failed=0)
            continue
        progress(f"{step.name}: {step.about}; {left / 60:.1f} minutes are left")
        if step.options is None:
            ended, bad = _equality(models, device, folder, until, progress)
        else:
            runner = Runner(replace(step.options, until=until), folder / step.file, progress)
            bad = runner.run()
            ended = not runner.out_of_time
        _note(folder, step, ended, bad)
        failed += bad
    return failed


def _note(folder: Path, step: Step, ended: bool, failed: int) -> None:
    with (folder / "steps.jsonl").open("a", encoding="utf-8") as file:
        line = {"step": step.name, "about": step.about, "ended": ended, "failures": failed}
        file.write(json.dumps(line | {"failed": failed > 0 or not ended}) + "\n")


def _equality(
    models: tuple[str, ...], device: str, folder: Path, until: float, progress: Callable[[str], None]
) -> tuple[bool, int]:
    """Compare each model in a process of its own; whether all were, and how many differ."""
    file = folder / "equality.jsonl"
    held = {(r["model"], r["device"], r["task"]): r for r in _read(file)}
    runner = Runner(Options(models, device=device, variants=(EAGER,)), file, progress)
    todo = [m for m in models if any((m, device, task) not in held for task in ("inference", "training"))]
    out_of_time = False

    def compared(model: str) -> list[Record]:
        left = until - time.monotonic()
        if left < LEAST:
            return [{"status": "timed out"}]
        with TemporaryDirectory(prefix="ariadne-equality-") as place:
            return runner.alone("equality", model, Path(place), left)

    with ThreadPoolExecutor(workers()) as pool:  # nothing is timed here
        for model, found in zip(todo, pool.map(compared, todo), strict=True):
            if any(r["status"] == "timed out" for r in found):
                out_of_time = True
                found = [r for r in found if r["status"] != "timed out"]
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(r) + "\n" for r in found)
                lines.flush()
                os.fsync(lines.fileno())
            for r in found:
                held[r["model"], r["device"], r["task"]] = r
                words = r.get("reason") or "; ".join(r.get("differs", ())) or f"{r['compared']} comparisons equal"
                progress(f"  {model}, {r['task']}: {words}" + (" (deterministic)" if r.get("deterministic") else ""))
    return not out_of_time, failed_or_died(held.values())


def workers() -> int:
    """How many models are compared at once."""
    return max(1, (os.cpu_count() or 1) // 2)


def _read(file: Path) -> Iterator[Record]:
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
