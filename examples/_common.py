"""What the real-model examples share: real models by short names, and the split held against the whole model."""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Read by ultralytics as it is imported; `nox` sets them too.
os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("YOLO_AUTOINSTALL", "false")

import torch
from torch import nn

import model_zoo
from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.compare import difference, largest_difference
from model_zoo import Entry

REAL_MODELS = {
    "yolov8n": "ultralytics/yolov8n",
    "rfdetr": "rfdetr/nano",
    "resnet50": "timm/resnet50",
    "swin_tiny": "timm/swin_tiny_patch4_window7_224",
    "mobilenet": "torchvision/mobilenet_v3_large",
    "deeplabv3": "torchvision/deeplabv3_resnet50",
}
TRACED_BATCH = 2


@dataclass(frozen=True)
class Compared:
    """The split held against the whole model: the first difference in words, or None, and the largest in numbers."""

    words: str | None = None
    largest: float = 0.0

    @classmethod
    def of(cls, whole: Any, split: Any, when: str) -> Compared:
        """Compare two nested results bit for bit; `when` says where they were taken."""
        words = difference(whole, split)
        if words is None:
            return cls()
        largest = float("inf") if words.startswith("structure") else largest_difference(whole, split)
        return cls(f"{when}: {words}", largest)

    def __add__(self, other: Compared) -> Compared:
        return Compared(self.words or other.words, max(self.largest, other.largest))


def entries(names: Sequence[str]) -> list[Entry]:
    """The zoo's models of these names, which may be short ones or "all"; `UnknownNameError` lists the nearest."""
    tails = {name.rpartition("/")[2]: name for name in model_zoo.names()}
    chosen = [short for name in names for short in (REAL_MODELS if name == "all" else [name])]
    return [model_zoo.entry(REAL_MODELS.get(name) or tails.get(name, name)) for name in dict.fromkeys(chosen)]


def prepare(entry: Entry, model: nn.Module, boundary: str = "percent:50") -> SplitRuntime:
    """The model of this entry, captured at batch 2 and split."""
    args, kwargs = entry.inputs(TRACED_BATCH)
    return prepare_split(model, args, example_kwargs=kwargs, split=SplitSpec(boundary, dynamic_batch=(1, 64)))


def replayed(runtime: SplitRuntime, entry: Entry, batch: int) -> Compared:
    """Prefix and suffix at one batch size against the model's own answer, under `torch.no_grad()`."""
    (args, kwargs), (again, kwargs_again) = (entry.inputs(batch, seed=batch) for _ in range(2))
    with torch.no_grad():
        whole = runtime.model(*args, **kwargs)
    split = runtime.run_suffix(runtime.run_prefix(*again, **kwargs_again))
    return Compared.of(whole, split, f"replay at batch {batch}")


def trained(runtime: SplitRuntime, entry: Entry, batch: int, steps: int = 1) -> Compared:
    """Training steps of the split against those of a copy of the model: all that such a step returns or changes."""
    whole, split = copy.deepcopy(runtime.model), copy.deepcopy(runtime)
    one = _sgd(list(whole.parameters()))
    prefix = split.prefix_parameters()
    mine = set(map(id, prefix))
    two = _sgd(prefix), _sgd([p for p in split.suffix_parameters() if id(p) not in mine])
    found = Compared()
    for step in range(steps):
        with torch.random.fork_rng():
            torch.manual_seed(step)
            args, kwargs = entry.inputs(batch, seed=step)
            whole.zero_grad()
            loss = entry.loss(whole(*args, **kwargs))
            loss.backward()
            if one is not None:
                one.step()
            expected = (loss.detach(), torch.get_rng_state(), _state(whole))
        with torch.random.fork_rng():
            torch.manual_seed(step)
            args, kwargs = entry.inputs(batch, seed=step)
            loss = split_step(split, entry, args, kwargs, *two)
            got = (loss, torch.get_rng_state(), _state(split.model))
        found += Compared.of(expected, got, f"step {step} at batch {batch}")
    return found


def split_step(
    runtime: SplitRuntime,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    prefix_optimizer: torch.optim.Optimizer | None,
    suffix_optimizer: torch.optim.Optimizer | None,
) -> torch.Tensor:
    """One training step, split; returns the loss. A side without parameters has no optimizer."""
    boundary = runtime.run_training_prefix(*args, **kwargs)
    loss, gradients = runtime.train_suffix(
        boundary, loss_fn=lambda output, _: entry.loss(output), optimizer=suffix_optimizer
    )
    runtime.backward_prefix(boundary, gradients, optimizer=prefix_optimizer)
    return loss


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9) if parameters else None


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": dict(model.named_parameters()),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def time_against_model(runtime: SplitRuntime, entry: Entry, seconds: float) -> float:
    """Time of the split over the model's own: medians of interleaved calls, batch 1, one thread, no gradients."""
    args, kwargs = entry.inputs(1)
    whole: Callable[[], Any] = lambda: runtime.model(*args, **kwargs)  # noqa: E731
    split: Callable[[], Any] = lambda: runtime.run_suffix(runtime.run_prefix(*args, **kwargs))  # noqa: E731
    times: dict[Callable[[], Any], list[float]] = {whole: [], split: []}
    with one_thread(), torch.no_grad():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[split]) < 5:
            for run in (whole, split):
                start = time.perf_counter()
                run()
                times[run].append(time.perf_counter() - start)
    return statistics.median(times[split]) / statistics.median(times[whole])


@contextmanager
def one_thread() -> Iterator[None]:
    """Run a block on one of torch's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def module_of(runtime: SplitRuntime) -> str:
    """Where a cut lies in the model: after a module, or inside one."""
    after, last = runtime.candidate.after, runtime.plan.nodes[runtime.candidate.cut - 1].module
    return f"after {after}" if after else f"in {last}" if last else "in forward"


class Progress:
    """What is being done now: one line that changes on a terminal, a line for each thing elsewhere."""

    def __init__(self, total: int) -> None:
        self._done, self._total, self._start = 0, total, time.perf_counter()
        self._terminal = sys.stderr.isatty()

    def step(self, what: str) -> None:
        """Start the next of the things to do."""
        self._done += 1
        width = 24
        full = width * (self._done - 1) // self._total
        line = f"[{'#' * full}{'.' * (width - full)}] {self._done}/{self._total} {self._seconds():4.0f} s  {what}"
        self._print(line, end="" if self._terminal else "\n")

    def close(self) -> None:
        """Leave the terminal's line."""
        self._print(f"done in {self._seconds():.0f} s", end="\n")

    def _print(self, line: str, end: str) -> None:
        print(f"\r\033[K{line}" if self._terminal else line, end=end, file=sys.stderr, flush=True)

    def _seconds(self) -> float:
        return time.perf_counter() - self._start


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under a head, in columns."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
