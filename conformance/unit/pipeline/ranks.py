"""Several processes as the ranks of one group, with limits; and one case of a pipeline held against the whole model in each."""

from __future__ import annotations

import copy
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from ariadne import tree
from ariadne.compare import difference
from ariadne.pipeline import Pipeline, load_part, prepare_pipeline
from ariadne.pipeline import schedule as schedule_of
from ariadne.pipeline.micro import merged
from ariadne.pipeline.steps import stages_of
from conformance.unit.forked_kit import forked
from conformance.unit.pipeline.nets import CASES

LIMIT = 120  # seconds for a job


JOINED = "joined"  # what a rank says when its group stands, before its job


def _rank(job: Callable[..., Any], rank: int, world: int, store: str, args: tuple[Any, ...], queue: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=40)
        )
        queue.put((rank, JOINED, None))
        found = job(rank, world, *args)
        queue.put((rank, None, found))
        dist.destroy_process_group()
    except BaseException as error:
        queue.put((rank, f"{type(error).__name__}: {error}", traceback.format_exc()))


def run(job: Callable[..., Any], world: int, *args: Any, limit: float = LIMIT) -> list[tuple[str | None, Any]]:
    """What `job(rank, world, *args)` returns on each rank: (error, result or traceback). Processes that take longer are ended.

    On a loaded machine gloo at times closes a connection while a group is made. No job has begun there, so the group is made anew,
    in new processes, at most three times.
    """
    for _ in range(3):
        joined, found = _once(job, world, args, time.monotonic() + limit)
        if joined or all(error is None for error, _ in found):
            break
    return found


def _once(
    job: Callable[..., Any], world: int, args: tuple[Any, ...], until: float
) -> tuple[bool, list[tuple[str | None, Any]]]:
    """One group of processes: whether all of them joined it, and what `run` returns. A group that can't be made ends at once."""
    context = forked()
    queue = context.Queue()
    joined: set[int] = set()
    found: dict[int, tuple[str | None, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_rank, args=(job, rank, world, store, args, queue), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            while len(found) < world and time.monotonic() < until:
                alive = any(p.is_alive() for p in processes)
                try:
                    rank, error, result = queue.get(timeout=0.2)
                except Empty:
                    if alive:
                        continue
                    break
                if error == JOINED:
                    joined.add(rank)
                    continue
                found[rank] = error, result
                if error is not None and rank not in joined:
                    break
        finally:
            for process in processes:
                process.join(2 if len(joined) == world else 0)
                if process.is_alive():
                    process.kill()
    return len(joined) == world, [found.get(rank, ("no answer in time", "")) for rank in range(world)]


def order(schedule: str, count: int) -> list[int]:
    """The order in which a schedule walks back through micro-batches."""
    return [*reversed(range(count))] if schedule == "LoopedBFS" else [*range(count)]


def made(case: str, parts: int, **options: Any) -> tuple[torch.nn.Module, Pipeline]:
    """A net of a case, and the pipeline of it."""
    torch.manual_seed(0)
    net = CASES[case].make()
    inputs = CASES[case].inputs(4, torch.Generator().manual_seed(1))
    return net, prepare_pipeline(net, inputs, parts=parts, **CASES[case].options, **options)


def step(schedule: Any, case: str, size: int, seed: int, training: bool = True) -> Any:
    """One step of a schedule on data of a size; the output, on the rank of the last part."""
    g = torch.Generator().manual_seed(seed)
    inputs, target = CASES[case].inputs(size, g), CASES[case].target(size, g)
    given: dict[str, Any] = {}
    if any(s.is_last for s in schedule.stages):
        given["target"] = target
    args = inputs if any(s.is_first for s in schedule.stages) else ()
    if training:
        return schedule.step(*args, **given)
    with torch.no_grad():
        return schedule.eval(*args)


def whole_step(
    net: torch.nn.Module, pipeline: Pipeline, schedule: str, case: str, size: int, seed: int, count: int
) -> Any:
    """The same step of the whole model over the same micro-batches, in the schedule's order."""
    g = torch.Generator().manual_seed(seed)
    inputs, target = CASES[case].inputs(size, g), CASES[case].target(size, g)
    losses, outputs = [], []
    for (args, kwargs), t in zip(pipeline.parted(inputs, {}, count), target.tensor_split(count), strict=True):
        with pipeline.microbatch():
            outputs.append(net(*args, **kwargs))
            losses.append(CASES[case].loss(outputs[-1], t))
    for i in order(schedule, count):
        losses[i].backward()
    for p in net.parameters():
        if p.grad is not None:
            p.grad.div_(count)
    return outputs, [loss.detach() for loss in losses]


def train(
    rank: int,
    world: int,
    case: str,
    schedule: str,
    parts: int,
    count: int,
    optimizer: str = "SGD",
    draws: str | None = None,
    files: str = "",
) -> list[str]:
    """Three optimizer steps on batches that differ, with evaluation between; what differs from the whole model, on this rank."""
    net, pipeline = made(case, parts, draws=draws)
    whole = copy.deepcopy(net)
    if files:
        mine_alone = [load_part(Path(files) / f"{i}.safetensors") for i in stages_of(schedule, parts, rank, world)]
        made_schedule = schedule_of(schedule, mine_alone, microbatches=count, loss_fn=CASES[case].loss)
    else:
        made_schedule = pipeline.schedule(schedule, microbatches=count, loss_fn=CASES[case].loss)
    kinds: dict[str, Any] = {
        "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
        "Adam": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    }
    mine = [s.submod for s in made_schedule.stages]
    held = made_schedule.parameters()
    one, other = kinds[optimizer](held or [torch.nn.Parameter(torch.zeros(1))]), kinds[optimizer](whole.parameters())
    wrong: list[str] = []

    def compare(what: str, a: Any, b: Any) -> None:
        if found := difference(a, b):
            wrong.append(f"{what}: {found}")

    for number, size in enumerate((4 * count, 4 * count - 2, 2 * count + 1)):
        torch.manual_seed(100 + number)
        outputs, losses = whole_step(whole, pipeline, schedule, case, size, number, count)
        after = torch.get_rng_state()
        torch.manual_seed(100 + number)
        found = step(made_schedule, case, size, number)
        if rank == 0:
            compare(f"step {number}: the generator", after, torch.get_rng_state())
        compare(f"step {number}: losses", losses, made_schedule.losses)
        if found is not None:
            sizes = [len(x) for x in torch.empty(size).tensor_split(count)]
            compare(f"step {number}: output", _bare(merged(outputs, sizes, [pipeline.plan])), _bare(found))
        for part in mine:
            for name, p in part.named_parameters():
                compare(f"step {number}: gradient of {name}", whole.get_parameter(name).grad, p.grad)
            for name, t in part.named_buffers():
                compare(f"step {number}: buffer {name}", whole.get_buffer(name), t)
        for o in (one, other):
            o.step()
            o.zero_grad()
        for part in mine:
            for name, p in part.named_parameters():
                compare(f"step {number}: {name}", whole.get_parameter(name).detach(), p.detach())
        torch.manual_seed(7)
        evaluated = step(made_schedule, case, 3 * count - 1, 9, training=False)
        torch.manual_seed(7)
        g = torch.Generator().manual_seed(9)
        inputs = CASES[case].inputs(3 * count - 1, g)
        with torch.no_grad():
            results = []
            for args, kwargs in pipeline.parted(inputs, {}, count):
                with pipeline.microbatch():
                    results.append(whole(*args, **kwargs))
        if evaluated is not None:
            sizes = [len(x) for x in torch.empty(3 * count - 1).tensor_split(count)]
            compare(f"step {number}: evaluated", merged(results, sizes, [pipeline.plan]), evaluated)
    return wrong


def _bare(value: Any) -> Any:
    return tree.map_leaves(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, value)


def matrix(rank: int, world: int, cases: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Many cases in one set of processes: what differs, by case."""
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[str(case)] = train(rank, world, *case)
        except Exception as error:
            found[str(case)] = [f"{type(error).__name__}: {error}", traceback.format_exc()]
    return found
