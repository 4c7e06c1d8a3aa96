"""Speed-up of a pipeline of 2 processes over one process, one thread each: `python -m benchmarks.pipeline`. ViT-Tiny, 1F1B.

It prints one line of JSON: seconds of a step of one process and of two, the medians of some rounds, and what was predicted
from op times.
The machine must be idle, with two cores at least.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch.nn import functional as F

from ariadne.capture import Example
from ariadne.cut import frontiers
from ariadne.pipeline import Costs, prepare_pipeline
from ariadne.pipeline.idle import played


def model() -> torch.nn.Module:
    """ViT-Tiny for images of 224, with weights from a seed."""
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=10)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels from a seed."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 224, 224, generator=g), torch.randint(10, (size,), generator=g)


def alone(options: argparse.Namespace) -> float:
    """Seconds of a step of the whole model over the same micro-batches, on one thread."""
    torch.set_num_threads(1)
    net, (x, y) = model(), batch(options.batch)
    taken = []
    for _ in range(options.rounds + 1):
        start = time.perf_counter()
        for a, b in zip(x.tensor_split(options.microbatches), y.tensor_split(options.microbatches), strict=True):
            F.cross_entropy(net(a), b).backward()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def rank(me: int, store: str, options: argparse.Namespace, queue: Any) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=me, world_size=2, timeout=timedelta(seconds=600)
    )
    net, (x, y) = model(), batch(options.batch)
    size = options.batch // options.microbatches
    pipeline = prepare_pipeline(net, (x[:size],), parts=2, balance="time")
    schedule = pipeline.schedule(options.schedule, microbatches=options.microbatches, loss_fn=F.cross_entropy)
    taken = []
    for _ in range(options.rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*([x] if me == 0 else []), **({"target": y} if me else {}))
        dist.barrier()
        taken.append(time.perf_counter() - start)
    if me == 0:
        costs = Costs.of("time", net, pipeline.plan, frontiers(pipeline.plan), Example.of((x[:size],), {}))
        found = played(options.schedule, costs.parts(pipeline.cuts), options.microbatches)
        queue.put((statistics.median(taken[1:]), found.seconds, [c.split_id for c in pipeline.cuts]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    one = alone(options)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank, args=(r, str(Path(folder) / "store"), options, queue)) for r in range(2)]
        for process in ranks:
            process.start()
        two, predicted, cuts = queue.get(timeout=1200)
        for process in ranks:
            process.join()
    print(
        json.dumps(
            {"one": one, "two": two, "speedup": one / two, "predicted": predicted, "cuts": cuts, **vars(options)}
        )
    )


if __name__ == "__main__":
    main()
