"""Pipelines, measured and foreseen: `python -m benchmarks.pipeline`. ViT-Tiny, 1F1B, one thread to each process. Minutes.

Each row is a line of JSON, printed as it comes:

- `stages`: the parts' forward and backward passes, one after the other, over those of the whole model (1.0 is as fast);
- `plan`: a model of 10,000 ops in 64 parts: seconds of the capture, of measuring its ops, and of planning;
- `step`, for each number of processes: seconds of a step of one process and of all, the speed-up, what was foreseen from op times,
  and `at_once`: how much longer a step of the whole takes when that many processes run it beside each other, sharing the cores
  evenly where they are fewer. The foreseen step is in that scale.

Steps of one process and of all are measured in turn, and the medians of ratios are given, so a machine that is busy shows less
of it. Figures to publish need an idle one, with as many cores as processes; fewer are shared, which the foreseen step knows.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ariadne.capture import Example
from ariadne.cut import frontiers
from ariadne.pipeline import Costs, Pipeline, layouts, prepare_pipeline, usable
from ariadne.pipeline.balance import op_times
from ariadne.pipeline.idle import played
from model_zoo.packages import package

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Data = tuple[torch.Tensor, torch.Tensor]


class Deep(nn.Module):
    """So many blocks of four ops each."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(x)).tanh()
        return x


def model(options: argparse.Namespace) -> nn.Module:
    """One of timm's for images, with weights from a seed."""
    torch.manual_seed(0)
    return package("timm").create_model(options.model, num_classes=10)


def data(size: int, options: argparse.Namespace) -> Data:
    """Images and labels from a seed."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, options.image, options.image, generator=g), torch.randint(10, (size,), generator=g)


def clocked(run: Callable[[], Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def whole_step(net: nn.Module, given: Data, microbatches: int) -> tuple[float, float]:
    """Seconds forward and back of a step of the whole model over micro-batches."""
    net.zero_grad()
    taken = [0.0, 0.0]
    for x, y in zip(*(t.tensor_split(microbatches) for t in given), strict=True):
        start = time.perf_counter()
        loss = F.cross_entropy(net(x), y)
        middle = time.perf_counter()
        loss.backward()
        taken[0] += middle - start
        taken[1] += time.perf_counter() - middle
    return taken[0], taken[1]


def stages(options: argparse.Namespace) -> dict[str, Any]:
    """The parts over the whole, in one process: the median over rounds of one beside the other."""
    torch.set_num_threads(1)
    net = model(options)
    x, y = data(options.batch // options.microbatches, options)
    pipeline, alone = prepare_pipeline(net, (x,), parts=options.processes[-1]), copy.deepcopy(net)

    def parts() -> None:
        output, flights = pipeline.forward(x)
        pipeline.backward(flights, F.cross_entropy(output, y))

    def whole() -> None:
        F.cross_entropy(alone(x), y).backward()

    ratios = []
    for i in range(4 * options.rounds + 2):
        pair = [(parts, net), (whole, alone)]
        seconds = {}
        for run, owner in pair if i % 2 else reversed(pair):
            owner.zero_grad()
            seconds[run] = clocked(run)
        ratios.append(seconds[parts] / seconds[whole])
    found = statistics.quantiles(ratios[2:], n=4)
    return {"row": "stages", "parts": len(pipeline), "over_whole": found[1], "quartiles": [found[0], found[2]]}


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """64 parts of many ops, from their measured times."""
    torch.set_num_threads(1)
    net, x = Deep(options.ops // 4), torch.randn(4, 32)
    start = time.perf_counter()
    made = prepare_pipeline(net, (x,), parts=2).plan
    captured = time.perf_counter()
    times = op_times(net, made, Example.of((x,), {}))
    measured = time.perf_counter()
    cuts = frontiers(made)
    costs = Costs.of("time", net, made, cuts, Example.of((x,), {}), times)
    balanced, even = layouts(usable(made, cuts), costs, 64, "time")
    planned = time.perf_counter()
    foreseen = played("1F1B", balanced.parts, 128)
    return {
        "row": "plan",
        "ops": len(made.nodes),
        "parts": len(balanced.parts),
        "capture_s": captured - start,
        "measure_s": measured - captured,
        "plan_s": planned - measured,
        "play_s": time.perf_counter() - planned,
        "imbalance": balanced.imbalance,
        "imbalance_even": even.imbalance,
        "idle": foreseen.idle,
    }


def foreseen(pipeline: Pipeline, x: torch.Tensor, both: tuple[float, float], options: argparse.Namespace) -> float:
    """Seconds of a step, from op times, which are put in scale by `both`: those of the whole model, forward and back."""
    made, example = pipeline.plan, Example.of((x,), {})
    times = op_times(pipeline.model, made, example)
    scale = both[0] / options.microbatches / sum(times)
    costs = Costs.of("time", pipeline.model, made, frontiers(made), example, [scale * t for t in times])
    return played(options.schedule, costs.parts(pipeline.cuts), options.microbatches, both[1] / both[0], CORES).seconds


def rank(me: int, world: int, store: str, options: argparse.Namespace, queue: Any) -> None:
    """One of the processes; the first one also runs the whole model, in turn with the pipeline."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=me, world_size=world, timeout=timedelta(seconds=600)
    )
    net, given = model(options), data(options.batch, options)
    x = given[0][: options.batch // options.microbatches]
    pipeline = prepare_pipeline(net, (x,), parts=world, balance="time")
    schedule = pipeline.schedule(options.schedule, microbatches=options.microbatches, loss_fn=F.cross_entropy)
    first, last = {0: [given[0]]}.get(me, []), {world - 1: {"target": given[1]}}.get(me, {})
    rows = []
    for _ in range(options.rounds + 1):
        net.zero_grad()
        dist.barrier()
        all_s = clocked(lambda: (schedule.step(*first, **last), dist.barrier()))
        one = whole_step(net, given, options.microbatches) if me == 0 else (0.0, 0.0)
        dist.barrier()
        forward, backward = whole_step(net, given, options.microbatches)
        dist.barrier()
        share = min(1.0, CORES / world)
        rows.append((all_s, one, (share * forward, share * backward)))
    if me == 0:
        median = statistics.median
        both = tuple(median(beside[i] for _, _, beside in rows[1:]) for i in (0, 1))
        step, guess = median(r[0] for r in rows[1:]), foreseen(pipeline, x, (both[0], both[1]), options)
        queue.put(
            {
                "row": "step",
                "processes": world,
                "one_s": median(sum(one) for _, one, _ in rows[1:]),
                "all_s": step,
                "speedup": median(sum(one) / all_s for all_s, one, _ in rows[1:]),
                "at_once": median(sum(beside) / sum(one) for _, one, beside in rows[1:]),
                "foreseen_s": guess,
                "foreseen_over_measured": guess / step,
                "cuts": [c.split_id for c in pipeline.cuts],
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def step(world: int, options: argparse.Namespace) -> dict[str, Any]:
    """A step of so many processes."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank, args=(r, world, str(Path(folder) / "store"), options, queue))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        found: dict[str, Any] = queue.get(timeout=1200)
        for process in ranks:
            process.join()
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="one of timm's")
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ops", type=int, default=10_000, help="of the model in 64 parts")
    options = parser.parse_args()
    print(json.dumps({"row": "about", "torch": torch.__version__, "cores": CORES, **vars(options)}), flush=True)
    for row in (
        lambda: stages(options),
        lambda: plan(options),
        *((lambda n=n: step(n, options)) for n in options.processes),
    ):
        print(json.dumps(row()), flush=True)


if __name__ == "__main__":
    main()
