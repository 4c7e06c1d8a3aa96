"""Parts: the model in three parts in one process, run at other batches and trained, against the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ariadne
from ariadne.errors import FrontierError
from conformance.checks.base import (
    PASSED,
    Check,
    hold,
    hold_counts,
    hold_moved,
    hold_outcomes,
    hold_rng,
    hold_state,
    left,
    no_grad,
    outcome,
)
from conformance.suite.bench import CAPTURED, LARGEST, REFERENCE, Bench, Split
from conformance.suite.cases import Case
from conformance.suite.compare import frozen
from conformance.suite.state import rng_moved, rng_state, seed_all
from conformance.suite.statuses import Finding, Status, Stop

PARTS, STEPS, MOMENTUM, BATCHES = 3, 2, 0.9, (1, REFERENCE, LARGEST)


def run(bench: Bench, case: Case) -> Finding:
    """Outputs, buffers and generators at three batches; two steps of training: outputs, loss, gradients, optimizer, buffers."""
    bench.judge(case.training)
    pipeline = _prepared(bench, case.training)
    bench.facts["parts"] = repr(pipeline)
    for batch in BATCHES:
        if _runs(bench, case.training, batch):
            _hold_forward(bench, case.training, pipeline, batch)
    if bench.trainable(case.training):
        _hold_training(bench, case.training, pipeline)
    return PASSED


def _preparing(bench: Bench) -> Callable[..., Any]:
    """How the target makes a pipeline."""
    if bench.target is ariadne.prepare_split:
        return ariadne.prepare_pipeline
    owner = getattr(bench.target, "__self__", None)
    found = getattr(owner, "prepare_pipeline", None)
    if found is None:
        raise Stop(Status.UNSUPPORTED, f"{bench.target_name} makes no pipelines")
    made: Callable[..., Any] = found
    return made


def _prepared(bench: Bench, training: bool) -> Any:
    """A pipeline of three parts, or of two where the model has no two cuts."""
    prepare, side = _preparing(bench), bench.side(training)
    args, kwargs = bench.inputs(CAPTURED)
    for parts in (PARTS, 2):
        seed_all(0)
        try:
            pipeline = prepare(side.model, args, parts=parts, dynamic_batch=(1, LARGEST), example_kwargs=kwargs)
        except FrontierError as error:
            if parts == 2:
                raise
            bench.facts["no_three_parts"] = str(error)[:200]
        else:
            break
    side.before.restore()
    return pipeline


def _runs(bench: Bench, training: bool, batch: int) -> bool:
    """Whether the whole model runs at a batch; what it says of it, the check `forward` does."""
    try:
        seed_all(batch)
        no_grad(bench.whole(training), bench.inputs(batch))
    except Exception:
        return False
    return True


def _hold_forward(bench: Bench, training: bool, pipeline: Any, batch: int) -> None:
    where = f"batch {batch}, {pipeline!r}"
    twin, side = bench.whole(training), bench.side(training)
    seed_all(batch)
    expected = no_grad(twin, bench.inputs(batch))
    after = rng_state()
    args, kwargs = bench.inputs(batch)
    seed_all(batch)
    found = pipeline(*args, **kwargs)
    moved = rng_moved(after, rng_state())
    hold("output of the parts", expected, frozen(found), where)
    hold_state(twin, Split(pipeline, side.model), bench, where)
    if moved:
        raise Stop(Status.FAIL_RNG, f"{where}: {moved}")


def _hold_training(bench: Bench, training: bool, pipeline: Any) -> None:
    twin, side, rate = bench.whole(training), bench.side(training), bench.rate(training)
    optimizers = [torch.optim.SGD(m.parameters(), lr=rate, momentum=MOMENTUM) for m in (twin, side.model)]
    for step in range(STEPS):
        where, kept = f"step {step}, {pipeline!r}", list[Any]()
        inputs = [bench.inputs(REFERENCE, 10 + step) for _ in optimizers]

        def whole(given: Any = inputs[0], kept: list[Any] = kept) -> torch.Tensor:
            optimizers[0].zero_grad()
            output = twin(*given[0], **given[1])
            kept.append(frozen(output))
            loss = bench.entry.loss(output)
            loss.backward()
            optimizers[0].step()
            return loss.detach()

        def parts(given: Any = inputs[1], kept: list[Any] = kept) -> torch.Tensor:
            optimizers[1].zero_grad()
            output, flights = pipeline.forward(*given[0], **given[1])
            kept.append(frozen(output))
            loss = bench.entry.loss(output)
            pipeline.backward(flights, loss)
            optimizers[1].step()
            return loss.detach()

        expected, found = outcome(whole, step), outcome(parts, step)
        if step and expected.error and not found.error:
            bench.facts["whole_ends"] = f"{type(expected.error).__name__} in step {step}"
            return
        hold_outcomes(expected, found)
        hold("output of the parts", *kept, where)
        hold("loss", expected.value, found.value, where)
        ours, theirs = (left(m, given, None) for m, given in zip((twin, side.model), inputs, strict=True))
        hold_moved(ours["gradients"], theirs["gradients"], f"gradients, {where}")
        hold_counts(ours, theirs, where)
        hold_state(twin, Split(pipeline, side.model), bench, where)
        hold_moved(*(_moments(o, m) for o, m in zip(optimizers, (twin, side.model), strict=True)), where)
        hold_rng(expected, found, where)


def _moments(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


CHECK = Check("parts", ("mode",), "the model in three parts equals the whole, run and trained", run, of_plans=True)
