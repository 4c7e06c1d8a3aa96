"""What a split costs: the figures that the project promises, measured as interleaved pairs in one process.

    python -m benchmarks.overhead [--minutes 3] [--pairs 300] [--only inference training paths ...]

Every ratio is the median over pairs of (split time / whole time), each pair run back to back in random order on one
thread; the eager-against-eager column is the noise floor. A row is printed when it is measured, and takes fewer pairs where
its share of the minutes is short. Nothing here is asserted: timing is for people to read.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import model_zoo
from ariadne import SplitSpec, prepare_split
from ariadne.boundary import BoundaryPayload
from ariadne.capture import Example
from ariadne.capture.ways import symbolic
from ariadne.cut import frontiers
from ariadne.guards import Effects
from ariadne.runtime import SplitRuntime
from benchmarks import branching, stopped
from benchmarks.memory import peak
from benchmarks.runner import ROOT, brought
from benchmarks.statistics import ratio_of_pairs
from benchmarks.timing import rounds
from model_zoo.packages import package


def pairs(
    whole: Callable[[], Any], split: Callable[[], Any], count: int, seconds: float, least: int = 20
) -> tuple[float, float, float]:
    """Median seconds of `whole`, median seconds of `split`, median of the ratios of up to `count` pairs in random order.

    There are as many as fit into `seconds`, but `least` of them; a tenth as many run before.
    """
    start = time.perf_counter()
    whole(), split()
    count = max(least, min(count, int(seconds / (time.perf_counter() - start))))
    for _ in range(count // 10):
        whole(), split()
    times = rounds({"whole": whole, "split": split}, count, random.Random(0))
    ratio = ratio_of_pairs(times["split"], times["whole"])
    return statistics.median(times["whole"]), statistics.median(times["split"]), ratio


def table(title: str, head: Sequence[str], first: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows as a Markdown table, each when it is there; `first`: what will stand in the first column."""
    widths = [max(map(len, (head[0], *first))), *(len(h) for h in head[1:])]

    def line(row: Sequence[str], fill: str = " ") -> None:
        print("| " + " | ".join(c.ljust(w, fill) for c, w in zip(row, widths, strict=True)) + " |", flush=True)

    print(f"\n## {title}\n")
    line(head)
    line([""] * len(head), "-")
    for row in rows:
        line(row)


def _now(what: str) -> None:
    """Say what is being measured, where somebody watches."""
    if sys.stderr.isatty():
        print(f"  {what} ...".ljust(78), end="\r", file=sys.stderr, flush=True)


def _resized(name: str, pixels: int) -> tuple[nn.Module, tuple[Any, ...]]:
    entry = model_zoo.entry(name)
    model = entry.build().eval()
    return model, (torch.randn(1, 3, pixels, pixels),)


def _vit_tiny_224() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return package("timm").create_model("vit_tiny_patch16_224", pretrained=False).eval(), (torch.randn(1, 3, 224, 224),)


def _mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    return model_zoo.entry("nn/mlp10x64").build().eval(), (torch.randn(1, 64),)


INFERENCE: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[Any, ...]]], float, int]] = {
    "MLP, 10 layers of 64": (_mlp, 0.75, 8),
    "mobilenet_v3_large, 96 px": (lambda: _resized("torchvision/mobilenet_v3_large", 96), 0.85, 1),
    "resnet18, 96 px": (lambda: _resized("torchvision/resnet18", 96), 0.98, 1),
    "vit_tiny, 224 px": (_vit_tiny_224, 0.97, 1),
}


TRAINING = {  # with the ratio to reach, and the batch
    "nn/mlp10x64": (1.08, 2),
    "torchvision/resnet18": (1.03, 4),
    "torchvision/mobilenet_v3_large": (1.03, 4),
    "torchvision/densenet121": (1.03, 4),
    "timm/vit_tiny_patch16_224": (1.03, 4),
    "ultralytics/yolov8n": (1.03, 4),
}
PREPARE = (
    "torchvision/resnet18",
    "torchvision/mobilenet_v3_large",
    "torchvision/swin_t",
    "timm/vit_tiny_patch16_224",
    "ultralytics/yolov8n",
)


def _inference_row(name: str, count: int, seconds: float) -> list[str]:
    _now(name)
    build, goal, more = INFERENCE[name]
    model, inputs = build()
    runtime = prepare_split(model, tuple(torch.cat([x, x]) for x in inputs), split="percent:50")

    def whole() -> Any:
        return model(*inputs)

    def split() -> Any:
        return runtime.run_suffix(runtime.run_prefix(*inputs))

    with torch.no_grad():
        floor = pairs(whole, whole, count, seconds / 3)
        a, b, ratio = pairs(whole, split, count * more, seconds / 3)
    return [name, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{ratio:.3f}", f"{goal}", f"{floor[2]:.3f}"]


def inference(count: int, seconds: float) -> None:
    """Generated eager, prefix + payload + suffix, over `model(x)`."""
    head = ["model, batch 1", "whole ms", "split ms", "split / whole", "to reach", "whole / whole"]
    rows = (_inference_row(name, count, seconds / len(INFERENCE)) for name in INFERENCE)
    table("Inference: prefix + payload + suffix over the model, no_grad", head, INFERENCE, rows)


def _training_ratios(name: str, count: int, seconds: float, split_first: bool) -> tuple[float, float, float, float]:
    """Median seconds of a whole step and of a split round, split / whole, and a second whole model / whole.

    The second model has pairs of its own: two wholes and one split in a round keep the code of the whole in the caches.

    What is built last lies at the end of the heap, where freed memory may go back to the system and must be faulted in again
    at each step: 2 ms of resnet18's 54. So processes take turns in what they build first.
    """
    torch.set_num_threads(1)
    entry = model_zoo.entry(name)
    model = entry.build().train()
    args, kwargs = entry.inputs(TRAINING[name][1])

    def stepping(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            entry.loss(model(*args, **kwargs)).backward()
            optimizer.step()

        return step

    runtime = prepare_split(model, args, example_kwargs=kwargs, split=SplitSpec("percent:50", trainable=True))
    prefix = torch.optim.SGD(runtime.prefix_parameters(), lr=1e-4, momentum=0.9)
    suffix = torch.optim.SGD(runtime.suffix_parameters(), lr=1e-4, momentum=0.9)

    def loss_fn(output: Any, _: Any) -> torch.Tensor:
        return entry.loss(output)

    def split() -> None:
        boundary = runtime.run_training_prefix(*args, **kwargs)
        _, gradients = runtime.train_suffix(boundary, loss_fn=loss_fn, optimizer=suffix)
        runtime.backward_prefix(boundary, gradients, optimizer=prefix)

    runs = {"whole": stepping(copy.deepcopy(model)), "copy": stepping(copy.deepcopy(model)), "split": split}
    for run in sorted(runs, key="split".__eq__, reverse=split_first):
        for _ in range(3):
            runs[run]()
    whole, split_time, ratio = pairs(runs["whole"], split, count, seconds * 2 / 3)
    return whole, split_time, ratio, pairs(runs["whole"], runs["copy"], count, seconds / 3)[2]


def _training_row(name: str, count: int, seconds: float, processes: int = 6) -> list[str]:
    """Two processes at least, and more while the row's seconds last."""
    found: list[tuple[float, float, float, float]] = []
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        while len(found) < processes:
            _now(f"{name}, process {len(found) + 1}")
            found.append(pool.apply(_training_ratios, (name, count, seconds / 4, bool(len(found) % 2))))
            spent = time.perf_counter() - start
            if len(found) >= 2 and spent * (len(found) + 1) / len(found) > seconds:
                break
    whole, split, ratios, floor = zip(*found, strict=True)
    row = [name, f"{statistics.median(whole) * 1e3:.2f}", f"{statistics.median(split) * 1e3:.2f}"]
    for some in (ratios, floor):
        row.append(f"{statistics.median(some):.3f} ({min(some):.3f} to {max(some):.3f})")
    return [*row[:4], str(TRAINING[name][0]), row[4], str(len(found))]


def training(count: int, seconds: float) -> None:
    """A split training round over a whole training step: medians over processes of medians of pairs."""
    rows = (_training_row(name, count, seconds / len(TRAINING)) for name in TRAINING)
    head = [
        "model",
        "whole ms",
        "split ms",
        "split / whole (processes)",
        "to reach",
        "copy / whole (processes)",
        "processes",
    ]
    table("Training: split round over whole step, batch 4 (MLP: 2)", head, TRAINING, rows)


def _prepare_row(name: str, count: int, seconds: float) -> list[str]:
    _now(name)
    entry = model_zoo.entry(name)
    model = _OnlyX(entry.build().eval())
    args, _ = entry.inputs(2)

    def export() -> None:
        fresh = copy.deepcopy(model)  # export leaves fake tensors in what YOLO caches
        torch.export.export(fresh, args, dynamic_shapes=({0: torch.export.Dim("B", min=1, max=64)},), strict=False)

    ops: list[int] = []

    def split() -> None:
        ops.append(len(prepare_split(model, args, split="percent:50").plan.nodes))

    a, b, ratio = pairs(export, split, max(3, count // 60), seconds / 2, least=1)
    return [name, str(ops[-1]), f"{a:.2f}", f"{b:.2f}", f"{b / ops[-1] * 1e3:.1f}", f"{ratio:.2f}"]


def prepare(count: int, seconds: float) -> None:
    """`prepare_split` at percent:50 over `torch.export.export` of the same model, same process."""
    rows = (_prepare_row(name, count, seconds / len(PREPARE)) for name in PREPARE)
    head = ["model", "ops", "export s", "prepare s", "ms an op (to reach: 3)", "prepare / export (to reach: 1.3)"]
    table("Prepare: prepare_split over torch.export", head, PREPARE, rows)


class _OnlyX(nn.Module):
    """The model with a forward of one input: torch.export wants a spec for every parameter of forward, `*args` too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


class _Chain(nn.Module):
    """As many ops, one after the other."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = torch.sin(x)
        return x


def _frontier_row(length: int) -> list[str]:
    _now(f"a chain of {length}")
    plan = symbolic(_Chain(length), Example.of((torch.randn(2, 4),), {}), "B", range(1, 65), False, Effects())
    times = []
    for _ in range(5):
        start = time.perf_counter()
        found = frontiers(plan)
        times.append(time.perf_counter() - start)
    return [str(length), str(len(found)), f"{statistics.median(times):.3f}", f"{3 * length / 10_000:.1f}"]


def frontier(count: int, seconds: float) -> None:
    """All frontiers of a chain of ops, structure checked."""
    lengths = (500, 1000, 2000)
    head = ["ops", "cuts", "seconds", "to reach"]
    table("Frontiers of a chain", head, map(str, lengths), map(_frontier_row, lengths))


def _memory_row(name: str) -> list[str]:
    _now(name)
    whole, split = peak(name)
    return [name, f"{whole / 2**20:.2f}", f"{split / 2**20:.2f}", f"{split / whole:.3f}", "1.05"]


def memory(count: int, seconds: float) -> None:
    """Peak memory of a split forward over the model's own, from the allocator's record."""
    names = ("torchvision/resnet18", "torchvision/densenet121", "ultralytics/yolov8n")
    head = ["model, batch 8", "whole MiB", "split MiB", "split / whole", "to reach"]
    table("Peak memory of tensors in a forward", head, names, map(_memory_row, names))


def guards(count: int, seconds: float) -> None:
    """What checking the guards costs per call."""
    model = model_zoo.entry("torchvision/resnet18").build().eval()
    runtime: SplitRuntime = prepare_split(model, (torch.randn(2, 3, 64, 64),), split="percent:50")
    variant = runtime._now[False]
    x = torch.randn(1, 3, 64, 64)
    rows = []
    checks: dict[str, Callable[[], Any]] = {
        "inputs": lambda: variant.enter((x,), {}),
        "modules of the prefix": variant.prefix_guard,
        "modules of the suffix": variant.suffix_guard,
        "payload": lambda: BoundaryPayload("cut:1", "", 1, ("x",), (x,)),
    }
    total = 0.0
    for name, check in checks.items():
        times = []
        for _ in range(count * 5):
            start = time.perf_counter()
            check()
            times.append(time.perf_counter() - start)
        total += statistics.median(times)
        rows.append([name, f"{statistics.median(times) * 1e6:.1f}"])
    rows.append([f"all, of {len(list(model.modules()))} modules (to reach: 20 for 100)", f"{total * 1e6:.1f}"])
    table("Guards", ["check", "µs per call"], (row[0] for row in rows), rows)


def _paths_row(place: tuple[str, str], count: int, seconds: float) -> list[str]:
    name, side = place
    _now(f"{name}, asked in the {side}")
    calls = branching.paths(name, side == "prefix")
    with torch.no_grad():
        straight, _, changing = pairs(calls.straight, calls.changing, count, seconds / 3)
        staying = pairs(calls.straight_staying, calls.staying, count, seconds / 3)[2]
        floor = pairs(calls.straight, calls.straight, count, seconds / 3)[2]
    return [f"{name}, {side}", f"{straight / 2 * 1e3:.3f}", f"{changing:.3f}", f"{staying:.3f}", "1.1", f"{floor:.3f}"]


def paths(count: int, seconds: float) -> None:
    """Calls of a model that asks, on paths that were seen before, over the same ops in splits that ask nothing."""
    places = [(name, side) for name in branching.MODELS for side in ("prefix", "suffix")]
    rows = (_paths_row(place, count, seconds / len(places)) for place in places)
    head = ["model, asked in", "no question ms", "another path each call", "same path", "to reach", "floor"]
    table("Paths seen before: prefix + suffix over the same ops without a question", head, map(", ".join, places), rows)


def _skipped_row(name: str, count: int, seconds: float) -> list[str]:
    _now(name)
    split, own = branching.skipped(name)
    with torch.no_grad():
        a, b, ratio = pairs(own, split, count, seconds * 2 / 3)
        floor = pairs(own, own, count, seconds / 3)[2]
    return [name, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{ratio:.3f}", "1.3", f"{floor:.3f}"]


def skipped(count: int, seconds: float) -> None:
    """The suffix of a Python split from bytes, its beginning skipped, over the model's own part after the cut."""
    names = [*branching.MODELS, *branching.DETECTORS]
    rows = (_skipped_row(name, count, seconds / len(names)) for name in names)
    head = ["model, cut in the middle", "own ms", "suffix ms", "suffix / own", "to reach", "own / own"]
    table("Python split: a suffix from bytes over the model's own time of that part", head, names, rows)


def _stopped_row(row: tuple[str, stopped.Fallback, bool], count: int, seconds: float) -> list[str]:
    name, fallback, trains = row
    _now(f"{name}, {fallback}")
    own, suffix = stopped.sides(name, fallback, trains)
    until, order = time.perf_counter() + seconds, random.Random(0)
    runs = {"own": own, "suffix": suffix}
    times: dict[str, list[float]] = {run: [] for run in runs}
    gc.collect()
    gc.disable()
    try:
        while len(times["own"]) < count and (len(times["own"]) < 10 or time.perf_counter() < until):
            for run in order.sample([*runs], 2):
                times[run].append(runs[run]())
    finally:
        gc.enable()
    a, b = (statistics.median(times[run]) for run in runs)
    ratio = ratio_of_pairs(times["suffix"], times["own"])
    mode = "training" if trains else "inference"
    return [name, stopped.BEFORE[fallback], mode, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{ratio:.2f}", "1.3"]


def after_python(count: int, seconds: float) -> None:
    """The suffix of a split that runs the model's own Python over the model's own part after the cut, both in one process."""
    rows = (_stopped_row(row, count, seconds / len(stopped.ROWS)) for row in stopped.ROWS)
    before = "before the cut".ljust(max(map(len, stopped.BEFORE.values())))
    head = ["model, cut in the middle", before, "mode     ", "own ms", "suffix ms", "suffix / own", "to reach"]
    table("Python split: a suffix over the model's own time of that part", head, stopped.MODELS, rows)


_MODEL = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model, x = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(64, 64), nn.ReLU()))).eval(), torch.randn(2, 64)
"""
_SPLIT = """
from ariadne import prepare_split
runtime = prepare_split(model, (x,), split="50%", mode={!r})
runtime.run_suffix(runtime.run_prefix(x))
"""
FIRST = {  # the mode, and the ratio or the seconds to reach
    "eager: first result": ("generated_eager", "1.5 times"),
    "compiled, packages kept: first result": ("compiled", "1.0 s more"),
}


def first_result(code: str, env: dict[str, str]) -> None:
    """Run a process until the code is done; how long Python then takes to let go of its modules is not waited for."""
    command = [sys.executable, "-c", code + "\nprint('done', flush=True)"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        if child.stdout.readline() != "done\n":
            raise RuntimeError(f"a process that was to be timed failed: {child.stderr.read()}")
        child.kill()


def _start_row(name: str, count: int, seconds: float) -> list[str]:
    mode, goal = FIRST[name]
    with tempfile.TemporaryDirectory() as kept:
        env = {**os.environ, "ARIADNE_CACHE_DIR": kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *brought()])}

        _now(f"{name}: packages are made")
        a, b, ratio = pairs(
            lambda: first_result(_MODEL + "model(x)", env),
            lambda: first_result(_MODEL + _SPLIT.format(mode), env),
            count,
            seconds,
            least=3,
        )
    return [name, f"{a:.2f}", f"{b:.2f}", f"{b - a:.2f}", f"{ratio:.2f}", goal]


def start(count: int, seconds: float) -> None:
    """Whole processes: from `python` to the first result of a split, over one that imports torch and calls the model."""
    rows = (_start_row(name, count, seconds / len(FIRST)) for name in FIRST)
    head = ["MLP, 10 layers of 64", "model s", "split s", "more s", "split / model", "to reach"]
    table("The first result of a process", head, FIRST, rows)


# With the share of the minutes that each gets. What comes before the pairs, a model built and prepared, is not counted.
SUITES = {"guards": (guards, 0.02), "inference": (inference, 0.15), "training": (training, 0.38), "paths": (paths, 0.04),
          "skipped": (skipped, 0.03), "stopped": (after_python, 0.04), "memory": (memory, 0.04), "frontier": (frontier, 0.02),
          "prepare": (prepare, 0.18), "start": (start, 0.1)}  # fmt: skip


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=int, default=300, help="pairs per row, where there is time (prepare takes fewer)"
    )
    parser.add_argument("--minutes", type=float, default=3, help="how long all of it is to take, on a quiet machine")
    parser.add_argument("--only", nargs="+", choices=sorted(SUITES), default=list(SUITES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, up to {args.pairs} pairs", flush=True)
    for name in args.only:
        suite, share = SUITES[name]
        suite(args.pairs, args.minutes * 60 * share)


if __name__ == "__main__":
    main()
