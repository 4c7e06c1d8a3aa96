"""The split in its modes, through the public interface that the PyPI reference shares: `import ariadne` finds either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ariadne import SplitSpec, prepare_split
from benchmarks.subject import EXAMPLE_BATCH, LARGEST_BATCH, Step, Subject, sgd

BOUNDARY = "percent:50"
_ahead: list[Any] = []  # the runtimes of this process that may compile ahead of time


def split(
    subject: Subject, batch: int, mode: str = "generated_eager", compile_options: Mapping[str, Any] | None = None
) -> Step:
    """`prepare_split` at half of the ops; one call is prefix, payload and suffix, or a whole training round."""
    args, kwargs = subject.inputs(EXAMPLE_BATCH)
    training = subject.task == "training"
    spec = SplitSpec(
        boundary=BOUNDARY, dynamic_batch=(1, LARGEST_BATCH), trainable=training, trace_batch_mode="batch_gt1"
    )
    options: dict[str, Any] = {"example_kwargs": kwargs} if kwargs else {}
    if compile_options:
        options["compile_options"] = compile_options
    runtime = prepare_split(subject.model(), example_inputs=args, split=spec, mode=mode, **options)
    if mode == "compiled":
        _ahead.append(runtime)
    if not training:
        return lambda args, kwargs: runtime.run_suffix(runtime.run_prefix(*args, **kwargs))
    prefix = runtime.prefix_parameters()
    mine = set(map(id, prefix))
    return rounds_of(subject, runtime, prefix, [p for p in runtime.suffix_parameters() if id(p) not in mine])


def rounds_of(subject: Subject, runtime: Any, prefix: list[Any], suffix: list[Any]) -> Step:
    """A training round of a split whose sides own these parameters."""
    prefix_optimizer, suffix_optimizer = sgd(prefix), sgd(suffix)

    def loss_fn(output: Any, _: Any) -> torch.Tensor:
        return subject.entry.loss(output)

    def train(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        boundary = runtime.run_training_prefix(*args, **kwargs)
        loss, gradients = runtime.train_suffix(boundary, None, loss_fn=loss_fn, optimizer=suffix_optimizer)
        runtime.backward_prefix(boundary, boundary_grads=gradients, optimizer=prefix_optimizer)
        return loss

    return train


def handed_over(subject: Subject, batch: int, compile_options: Mapping[str, Any]) -> Step:
    """A split under CUDA graphs that copies nothing out of their memory: it can have one boundary in flight, and no more.

    No mode of the library's: it tells what the copies cost.
    """
    from ariadne.compiled import graphs  # noqa: PLC0415 - the reference has no such module

    step = split(subject, batch, "compiled", compile_options)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graphs.Graphs.copies = False
        try:
            return step(args, kwargs)
        finally:
            graphs.Graphs.copies = True

    return run


def ahead_of_time(subject: Subject, batch: int) -> Step:
    """Segments built by AOTInductor; packages are kept in the subject's cache, where it has one."""
    kept = {"cache_dir": str(subject.cache)} if subject.cache is not None else {}
    return split(subject, batch, "compiled", {"backend": "aot_inductor", **kept})


def graphs_recorded() -> int:
    """How many CUDA graphs the library recorded in this process so far."""
    return sum(getattr(segment, "recorded", 0) for runtime in _ahead for segment in runtime.report().segments)


def packages_compiled() -> int:
    """How many packages were compiled, not loaded, in this process so far."""
    segments = (segment for runtime in _ahead for segment in runtime.report().segments)
    return sum(n for s in segments for grad, n in s.compiled.items() if s.ways.get(grad) == "ahead of time")
