"""Train a model in several processes, on torch's pipeline schedules: `torchrun --nproc-per-node 4 examples/pipeline_training.py`.

Each process holds one part of the model (two under schedules that want two), and at the end rank 0 says whether all gradients
of the first step were the whole model's, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ariadne import Pipeline, prepare_pipeline
from ariadne.compare import difference

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def gpt2() -> tuple[nn.Module, Callable[[int], tuple[Any, torch.Tensor]], Loss]:
    """A small GPT-2 with a tied embedding, from transformers."""
    transformers = importlib.import_module("transformers")  # only this model needs it
    config = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=4, n_head=4, use_cache=False)

    def batch(size: int) -> tuple[Any, torch.Tensor]:
        tokens = torch.randint(96, (size, 17))
        return tokens[:, :-1], tokens[:, 1:]

    def loss(out: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out["logits"].flatten(0, 1), target.flatten())

    return transformers.GPT2LMHeadModel(config), batch, loss


def mlp() -> tuple[nn.Module, Callable[[int], tuple[Any, torch.Tensor]], Loss]:
    """A stack of linear layers with dropout."""
    layers = [m for _ in range(8) for m in (nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1))]
    net = nn.Sequential(*layers, nn.Linear(32, 10))
    return net, lambda size: (torch.randn(size, 32), torch.randint(10, (size,))), F.cross_entropy


MODELS = {"gpt2": gpt2, "mlp": mlp}
TWO_ON_EACH = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


def equal_to_whole(
    whole: nn.Module, pipeline: Pipeline, schedule: Any, batch: tuple[Any, torch.Tensor], loss: Loss, backward: bool
) -> bool:
    """Whether this rank's gradients are those of the whole model over the same micro-batches."""
    (x, y), count, losses = batch, schedule._n_microbatches, []
    for (args, kwargs), target in zip(pipeline.parted((x,), {}, count), y.tensor_split(count), strict=True):
        with pipeline.microbatch():
            losses.append(loss(whole(*args, **kwargs), target))
    for one in reversed(losses) if backward else losses:
        one.backward()
    for p in whole.parameters():
        if p.grad is not None:
            p.grad.div_(count)
    pairs = [(whole.get_parameter(n).grad, p.grad) for s in schedule.stages for n, p in s.submod.named_parameters()]
    return all(difference(a, b) is None for a, b in pairs)


def main() -> None:
    """Train, and say what came of it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", choices=MODELS, default="mlp")
    options.add_argument("--schedule", default="1f1b")
    options.add_argument("--batch", type=int, default=30)
    options.add_argument("--steps", type=int, default=3)
    given = options.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, batch, loss = MODELS[given.model]()
    whole = copy.deepcopy(model)
    parts = world * (2 if given.schedule.lower() in TWO_ON_EACH else 1)
    count = 2 * parts
    pipeline = prepare_pipeline(model, batch(4)[:1], parts=parts)
    schedule = pipeline.schedule(given.schedule, microbatches=count, loss_fn=loss)
    optimizer = torch.optim.AdamW(schedule.parameters(), lr=0.01)

    same = True
    for number in range(given.steps):
        torch.manual_seed(
            1 + number
        )  # the same batch on each rank; a data loader would give the first rank x, the last one y
        x, y = batch(given.batch)
        drawn = torch.get_rng_state()
        optimizer.zero_grad()
        first, last = any(s.is_first for s in schedule.stages), any(s.is_last for s in schedule.stages)
        schedule.step(*([x] if first else []), **({"target": y} if last else {}))
        if number == 0:
            torch.set_rng_state(drawn)
            same = equal_to_whole(whole, pipeline, schedule, (x, y), loss, given.schedule.lower() == "loopedbfs")
        optimizer.step()
        if rank == 0:
            print(f"step {number}: loss {torch.stack(schedule.losses).mean():.4f}", flush=True)
    agreed = torch.tensor(int(same))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if rank == 0:
        print(f"{pipeline}, {given.schedule}: gradients equal to the whole model's: {bool(agreed)}", flush=True)
    dist.destroy_process_group()
    if not agreed:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
