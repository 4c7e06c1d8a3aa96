"""What a split costs: the figures that the project promises, measured as interleaved pairs in one process.

    python -m benchmarks.overhead [--pairs 300] [--only inference training prepare frontier memory]

Every ratio is the median over pairs of (split time / whole time), each pair run back to back in random order on one
thread; the eager-against-eager row is the noise floor. Nothing here is asserted: timing is for people to read.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from torch import nn

import model_zoo
from ariadne import SplitSpec, prepare_split
from ariadne.boundary import BoundaryPayload
from ariadne.capture import Example
from ariadne.capture.ways import symbolic
from ariadne.cut import frontiers
from ariadne.runtime import SplitRuntime
from benchmarks.memory import peak
from benchmarks.statistics import ratio_of_pairs
from benchmarks.tables import table as markdown
from benchmarks.timing import rounds


def pairs(
    whole: Callable[[], Any], split: Callable[[], Any], count: int, warmup: int = 10
) -> tuple[float, float, float]:
    """Median seconds of `whole`, median seconds of `split`, median of the ratios of `count` pairs in random order."""
    for _ in range(warmup):
        whole(), split()
    times = rounds({"whole": whole, "split": split}, count, random.Random(0))
    ratio = ratio_of_pairs(times["split"], times["whole"])
    return statistics.median(times["whole"]), statistics.median(times["split"]), ratio


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a Markdown table."""
    print(markdown(title, head, rows), flush=True)


def _resized(name: str, pixels: int) -> tuple[nn.Module, tuple[Any, ...]]:
    entry = model_zoo.entry(name)
    model = entry.build().eval()
    return model, (torch.randn(1, 3, pixels, pixels),)


def _vit_tiny_224() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", pretrained=False).eval(), (torch.randn(1, 3, 224, 224),)


def _mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    return model_zoo.entry("nn/mlp10x64").build().eval(), (torch.randn(1, 64),)


INFERENCE: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[Any, ...]]], float, int]] = {
    "MLP, 10 layers of 64": (_mlp, 0.75, 8),
    "mobilenet_v3_large, 96 px": (lambda: _resized("torchvision/mobilenet_v3_large", 96), 0.85, 1),
    "resnet18, 96 px": (lambda: _resized("torchvision/resnet18", 96), 0.98, 1),
    "vit_tiny, 224 px": (_vit_tiny_224, 0.97, 1),
}


TRAINING = (
    "torchvision/resnet18",
    "torchvision/mobilenet_v3_large",
    "torchvision/densenet121",
    "timm/vit_tiny_patch16_224",
    "ultralytics/yolov8n",
)
PREPARE = (
    "torchvision/resnet18",
    "torchvision/mobilenet_v3_large",
    "torchvision/swin_t",
    "timm/vit_tiny_patch16_224",
    "ultralytics/yolov8n",
)


def _inference_row(name: str, count: int) -> list[str]:
    build, goal, more = INFERENCE[name]
    model, inputs = build()
    runtime = prepare_split(model, tuple(torch.cat([x, x]) for x in inputs), split="percent:50")

    def whole() -> Any:
        return model(*inputs)

    def split() -> Any:
        return runtime.run_suffix(runtime.run_prefix(*inputs))

    with torch.no_grad():
        floor = pairs(whole, whole, count)
        a, b, ratio = pairs(whole, split, count * more)
    return [name, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{ratio:.3f}", f"{goal}", f"{floor[2]:.3f}"]


def inference(count: int) -> None:
    """Generated eager, prefix + payload + suffix, over `model(x)`."""
    head = ["model, batch 1", "whole ms", "split ms", "split / whole", "to reach", "whole / whole"]
    rows = [_inference_row(name, count) for name in INFERENCE]
    table("Inference: prefix + payload + suffix over the model, no_grad", head, rows)


def _training_ratios(name: str, count: int, split_first: bool) -> tuple[float, float, float, float]:
    """Median seconds of a whole step and of a split round, split / whole, and a second whole model / whole.

    What is built last lies at the end of the heap, where freed memory may go back to the system and must be faulted in again
    at each step: 2 ms of resnet18's 54. So processes take turns in what they build first.
    """
    torch.set_num_threads(1)
    entry = model_zoo.entry(name)
    model = entry.build().train()
    args, kwargs = entry.inputs(4)

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
    times = rounds(runs, count, random.Random(int(split_first)))
    return (
        statistics.median(times["whole"]),
        statistics.median(times["split"]),
        ratio_of_pairs(times["split"], times["whole"]),
        ratio_of_pairs(times["copy"], times["whole"]),
    )


def _training_row(name: str, count: int, processes: int = 6) -> list[str]:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = [pool.apply(_training_ratios, (name, count, bool(k % 2))) for k in range(processes)]
    whole, split, ratios, floor = zip(*found, strict=True)
    row = [name, f"{statistics.median(whole) * 1e3:.2f}", f"{statistics.median(split) * 1e3:.2f}"]
    for some in (ratios, floor):
        row.append(f"{statistics.median(some):.3f} ({min(some):.3f} to {max(some):.3f})")
    return [*row[:4], "1.03", row[4]]


def training(count: int) -> None:
    """A split training round over a whole training step: medians over processes of medians of pairs."""
    rows = [_training_row(name, max(20, count // 6)) for name in TRAINING]
    head = ["model", "whole ms", "split ms", "split / whole (processes)", "to reach", "copy / whole (processes)"]
    table("Training: split round over whole step, batch 4, six processes", head, rows)


def _prepare_row(name: str, count: int) -> list[str]:
    entry = model_zoo.entry(name)
    model = _OnlyX(entry.build().eval())
    args, _ = entry.inputs(2)

    def export() -> None:
        fresh = copy.deepcopy(model)  # export leaves fake tensors in what YOLO caches
        torch.export.export(fresh, args, dynamic_shapes=({0: torch.export.Dim("B", min=1, max=64)},), strict=False)

    def split() -> None:
        prepare_split(model, args, split="percent:50")

    a, b, ratio = pairs(export, split, max(3, count // 60), warmup=1)
    return [name, f"{a:.2f}", f"{b:.2f}", f"{ratio:.2f}", "1.6"]


def prepare(count: int) -> None:
    """`prepare_split` at percent:50 over `torch.export.export` of the same model, same process."""
    rows = [_prepare_row(name, count) for name in PREPARE]
    head = ["model", "export s", "prepare s", "prepare / export", "to reach"]
    table("Prepare: prepare_split over torch.export", head, rows)


class _OnlyX(nn.Module):
    """The model with a forward of one input: torch.export wants a spec for every parameter of forward, `*args` too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


def frontier(count: int) -> None:
    """All frontiers of a chain of ops, structure checked."""

    class Chain(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.length = length

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.length):
                x = torch.sin(x)
            return x

    rows = []
    for length in (2500, 5000, 10000):
        plan = symbolic(Chain(length), Example.of((torch.randn(2, 4),), {}), "B", range(1, 65), False)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            found = frontiers(plan)
            times.append(time.perf_counter() - start)
        rows.append([str(length), str(len(found)), f"{statistics.median(times):.3f}", "3 at 10,000"])
    table("Frontiers of a chain", ["ops", "cuts", "seconds", "to reach"], rows)


def memory(count: int) -> None:
    """Peak memory of a split forward over the model's own, from the allocator's record."""
    rows = []
    for name in ("torchvision/resnet18", "torchvision/densenet121", "ultralytics/yolov8n"):
        whole, split = peak(name)
        rows.append([name, f"{whole / 2**20:.2f}", f"{split / 2**20:.2f}", f"{split / whole:.3f}", "1.05"])
    table(
        "Peak memory of tensors in a forward",
        ["model, batch 8", "whole MiB", "split MiB", "split / whole", "to reach"],
        rows,
    )


def guards(count: int) -> None:
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
    table("Guards, µs per call", ["check", "µs"], rows)


SUITES = {f.__name__: f for f in (inference, training, prepare, frontier, memory, guards)}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="pairs per row (training and prepare take fewer)")
    parser.add_argument("--only", nargs="+", choices=sorted(SUITES), default=list(SUITES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {args.pairs} pairs")
    for name in args.only:
        SUITES[name](args.pairs)


if __name__ == "__main__":
    main()
