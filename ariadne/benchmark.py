"""Timing a split on the machine at hand: the model itself, both segments, the suffix alone, and the two halves of training.

Each `measure_…` runs one thing `warmup` times and then `iterations` times, one after another, and leaves the model as found:
parameters, gradients, buffers and RNG states. On CUDA the device is synchronised around every call.

>>> results = measure_all(
...     model, (torch.randn(8, 3, 224, 224),), split="percent:50", modes=("generated_eager", "compiled")
... )
>>> print(*results, sep="\\n")

These are samples of one process, for a quick look. Whether a difference between two of them counts takes several processes
and a noise floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.capture import left_as_found
from ariadne.cut import CompileOptions, ExecutionMode, SplitSpec
from ariadne.errors import SpecError, TrainingError
from ariadne.prepare import prepare_split
from ariadne.runtime import SplitRuntime

Loss = Callable[[Any, Any], torch.Tensor]
What = Literal["direct_forward", "prefix_suffix", "suffix_replay", "suffix_training", "prefix_backward"]


@dataclass(frozen=True)
class BenchmarkResult:
    """What was timed, on which batch, and the seconds of every call in order.

    `mode` is the split's execution mode, and "eager" for the model itself, which has no `split_id`. `cuda_peak_bytes`: the
    most that CUDA's allocator held during the calls, weights included; None where the model is not on CUDA.
    """

    what: What
    mode: str
    split_id: str | None
    batch: int
    seconds: tuple[float, ...]
    cuda_peak_bytes: int | None = None

    @property
    def average(self) -> float:
        """Mean seconds of a call."""
        return statistics.fmean(self.seconds)

    @property
    def median(self) -> float:
        """Median seconds of a call, which a single slow one does not move."""
        return statistics.median(self.seconds)

    @property
    def total(self) -> float:
        """Seconds of all calls together."""
        return sum(self.seconds)

    def __str__(self) -> str:
        where = "" if self.split_id is None else f" at {self.split_id}"
        memory = "" if self.cuda_peak_bytes is None else f", {self.cuda_peak_bytes / 2**20:.1f} MiB of CUDA memory"
        return (
            f"{self.what} ({self.mode}{where}), batch {self.batch}: {self.average * 1e3:.3f} ms on average, "
            f"{self.total:.3f} s in {len(self.seconds)} calls{memory}"
        )


def measure_forward(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    iterations: int = 20,
    warmup: int = 5,
) -> BenchmarkResult:
    """The model's own forward under `torch.no_grad()`: what a split is measured against."""
    args, kwargs = tuple(example_inputs), dict(example_kwargs or {})
    with _undisturbed(model), torch.no_grad():
        seconds, peak = _times(lambda _: model(*args, **kwargs), _nothing, _device(model), iterations, warmup)
    return BenchmarkResult("direct_forward", "eager", None, _batch(args, kwargs), seconds, peak)


def measure_split(
    runtime: SplitRuntime,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    iterations: int = 20,
    warmup: int = 5,
) -> BenchmarkResult:
    """Prefix, boundary and suffix, in the mode of the runtime."""
    args, kwargs = given = tuple(example_inputs), dict(example_kwargs or {})
    prefix = partial(runtime.run_prefix, *args, **kwargs)
    return _of(runtime, "prefix_suffix", lambda _: runtime.run_suffix(prefix()), _nothing, given, iterations, warmup)


def measure_suffix(
    runtime: SplitRuntime,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    iterations: int = 20,
    warmup: int = 5,
) -> BenchmarkResult:
    """The suffix alone, on a boundary that was made before."""
    args, kwargs = given = tuple(example_inputs), dict(example_kwargs or {})
    boundary = partial(runtime.run_prefix, *args, **kwargs)
    return _of(runtime, "suffix_replay", runtime.run_suffix, boundary, given, iterations, warmup)


def measure_suffix_training(
    runtime: SplitRuntime,
    example_inputs: Sequence[Any],
    targets: Any = None,
    *,
    loss_fn: Loss | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    iterations: int = 20,
    warmup: int = 5,
) -> BenchmarkResult:
    """`train_suffix` without an optimizer: the suffix, the loss and the backward pass of both.

    `loss_fn(output, targets)`; without one, the mean square of every floating tensor of the output.
    """
    args, kwargs = given = tuple(example_inputs), dict(example_kwargs or {})
    boundary = partial(runtime.run_training_prefix, *args, **kwargs)
    train = partial(runtime.train_suffix, targets=targets, loss_fn=loss_fn or _mean_square)
    return _of(runtime, "suffix_training", train, boundary, given, iterations, warmup)


def measure_prefix_backward(
    runtime: SplitRuntime,
    example_inputs: Sequence[Any],
    targets: Any = None,
    *,
    loss_fn: Loss | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    iterations: int = 20,
    warmup: int = 5,
) -> BenchmarkResult:
    """`backward_prefix` without an optimizer: the boundary's gradients back through the prefix's graph."""
    args, kwargs = given = tuple(example_inputs), dict(example_kwargs or {})
    if not any(p.requires_grad for p in runtime.prefix_parameters()):
        raise TrainingError(
            f"the prefix at {runtime.split_id} has no parameter to train, so there is no backward pass to time; cut later"
        )

    def trained() -> tuple[BoundaryPayload, Any]:
        boundary = runtime.run_training_prefix(*args, **kwargs)
        return boundary, runtime.train_suffix(boundary, targets, loss_fn=loss_fn or _mean_square)[1]

    return _of(
        runtime, "prefix_backward", lambda made: runtime.backward_prefix(*made), trained, given, iterations, warmup
    )


def measure_all(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: SplitSpec | str,
    modes: Sequence[ExecutionMode] = ("debug_interpreter", "generated_eager"),
    compile_options: Mapping[str, Any] | None = None,
    targets: Any = None,
    loss_fn: Loss | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    iterations: int = 20,
    warmup: int = 5,
) -> list[BenchmarkResult]:
    """The model's forward, and in each mode prefix + suffix, the suffix alone, suffix training and prefix backward.

    The split is prepared once for each mode. Training is left out where the suffix has nothing to train, and where it is compiled
    ahead of time, which serves inference; prefix backward where the prefix has nothing.
    """
    given: dict[str, Any] = {"example_kwargs": example_kwargs, "iterations": iterations, "warmup": warmup}
    results = [measure_forward(model, example_inputs, **given)]
    for mode in modes:
        options = compile_options if mode == "compiled" else None
        runtime = prepare_split(
            model, example_inputs, split=split, mode=mode, compile_options=options, example_kwargs=example_kwargs
        )
        results += [measure_split(runtime, example_inputs, **given), measure_suffix(runtime, example_inputs, **given)]
        inference_only = mode == "compiled" and CompileOptions.parse(compile_options).ahead
        if not inference_only and any(p.requires_grad for p in runtime.suffix_parameters()):
            results.append(measure_suffix_training(runtime, example_inputs, targets, loss_fn=loss_fn, **given))
            if any(p.requires_grad for p in runtime.prefix_parameters()):
                results.append(measure_prefix_backward(runtime, example_inputs, targets, loss_fn=loss_fn, **given))
    return results


def _of(
    runtime: SplitRuntime,
    what: What,
    run: Callable[[Any], Any],
    before: Callable[[], Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    iterations: int,
    warmup: int,
) -> BenchmarkResult:
    with _undisturbed(runtime.model, runtime):
        seconds, peak = _times(run, before, _device(runtime.model), iterations, warmup)
    leaves = [*tree.leaves(inputs)]
    batch = next((leaves[i].shape[dim] for i, dim in runtime.plan.batched.items()), runtime.plan.traced_batch)
    return BenchmarkResult(what, runtime.settings.mode, runtime.split_id, batch, seconds, peak)


def _times(
    run: Callable[[Any], Any], before: Callable[[], Any], device: torch.device, iterations: int, warmup: int
) -> tuple[tuple[float, ...], int | None]:
    """The seconds of each call of `run` on what `before` made for it, untimed; and the most CUDA memory that any took."""
    if iterations < 1 or warmup < 0:
        raise SpecError(f"iterations is at least 1 and warmup at least 0; found {iterations} and {warmup}")
    cuda = device.type == "cuda"
    synchronise: Callable[[], Any] = (lambda: torch.cuda.synchronize(device)) if cuda else _nothing
    for _ in range(warmup):
        run(before())
    seconds, peaks = [], []
    for _ in range(iterations):
        made = before()
        synchronise()
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)  # what `before` took at most is not this call's
        start = time.perf_counter()
        run(made)
        synchronise()
        seconds.append(time.perf_counter() - start)
        if cuda:
            peaks.append(torch.cuda.max_memory_allocated(device))
    return tuple(seconds), max(peaks, default=None)


@contextmanager
def _undisturbed(model: nn.Module, runtime: SplitRuntime | None = None) -> Iterator[None]:
    """Run a block with no gradients on the model to add to, and put back all that it moves."""
    with left_as_found(model, () if runtime is None else runtime.plans, buffers=True):
        for parameter in model.parameters():
            parameter.grad = None
        yield


def _nothing() -> None:
    """What there is to do where nothing is."""


def _device(model: nn.Module) -> torch.device:
    first = next((t for tensors in (model.parameters(), model.buffers()) for t in tensors), None)
    return torch.device("cpu") if first is None else first.device


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Dim 0 of the first tensor; 1 where there is none."""
    first = next((t for t in tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()), None)
    return 1 if first is None else first.shape[0]


def _mean_square(output: Any, targets: Any) -> torch.Tensor:
    """A loss for any output; ignores the targets."""
    found = [t for t in tree.leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not found:
        raise TrainingError("the output holds no floating tensor to make a loss of; pass loss_fn")
    return torch.stack([t.square().mean() for t in found]).sum()
