"""Symbolic runs: forward on tensors without data whose batch is a symbol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture.context import in_its_own_context
from ariadne.capture.drawn import drawn_from
from ariadne.capture.example import Example, called
from ariadne.capture.foreseen import fake_mode, forget_real
from ariadne.capture.lower import Lowering
from ariadne.capture.observed import with_stores
from ariadne.capture.reach import Reach
from ariadne.capture.recorded import recording
from ariadne.capture.shapes import (
    PlainNumberError,
    Sizes,
    under_conditions,
    with_symbols,
    within_questions,
    within_shapes,
)
from ariadne.capture.values import state_tensors
from ariadne.guards import (
    Effects,
    Recording,
    simple,
)
from ariadne.plan import (
    Batches,
    Size,
    TracePlan,
    check,
    prune,
)


def above_1(batches: range) -> Batches:
    """The batches of a range that no size of 1 makes special."""
    return Batches.of(range(max(2, batches.start), batches.stop))


@in_its_own_context
def symbolic(model: nn.Module, example: Example, batch_symbol: str, batches: range, grad: bool, effects: Effects,
             recordings: list[Recording] | None = None, over: Sequence[Size] = ()) -> TracePlan:  # fmt: skip
    """Run the forward on fake tensors whose batch is a symbol; the plan holds for batches that meet every guard.

    So are the sizes named in `over`, which must differ from the batch and each other; then the plan has conditions. What it read of
    the model's Python state is added to `recordings`, as far as that can't be something fake.
    """
    shapes = Sizes()
    fake = fake_mode(shapes)
    size = max(example.batch, 2) if example.batched else example.batch
    leaves = example.resized(size)
    reach = Reach(model)
    inputs: list[Any] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            inputs.append(leaf)
            continue
        dims = {example.batched[i]} if i in example.batched else set()
        inputs.append(with_symbols(fake, leaf, f"x{i}", dims | {s.dim for s in over if s.leaf == i}))
    named = [
        *((i, dim, batch_symbol) for i, dim in [*example.batched.items()][:1]),
        *((s.leaf, s.dim, s.symbol) for s in over),
    ]
    symbols = {inputs[leaf].shape[dim].node.expr: symbol for leaf, dim, symbol in named}
    args, kwargs = tree.unflatten(inputs, example.spec)
    snapshot = reach.snapshot(args, kwargs)
    state = state_tensors(snapshot)
    containers = reach.containers(args, kwargs)
    found = Recording()
    try:
        with torch.set_grad_enabled(grad), recording(model, fake, snapshot) as (found, recorder):
            shapes.recorder = recorder
            found.output = model(*args, **kwargs)
        shapes.recorder = None
        found.effects = containers.changes()
        if found.read_size:  # and it caught the error
            raise PlainNumberError(found.read_size)
        names = called(model, example.spec)
        low = Lowering(model, found, snapshot, state, inputs, example.batched, fake, batch_symbol, {**symbols}, names)
        low.sizes(over)
        served = above_1(batches) if example.batched else Batches.of(batches)
        plan = low.plan(example.spec, size, served, "symbolic", grad)
        plan = with_stores(plan, effects, found.effects, low.put, reach)
        if recordings is not None:
            found.forget_tensors()
            found.read_attributes = {k: read for k, read in found.read_attributes.items() if simple(read[1])}
            recordings.append(found)
    finally:
        snapshot.restore(drawn_from(found, snapshot))  # no fake tensor draws; Python does
        forget_real(fake)
    of_ops, of_forward = shapes.asked("op", symbols), shapes.asked("forward", symbols)
    if over:  # no batch is tried at other sizes: where an op asks, its answer counts as well
        ranges = {s.symbol: s.within for s in over}
        return check(prune(under_conditions(plan, {**of_ops, **of_forward}, ranges)))
    plan = within_questions(plan, of_forward)
    if found.raised:  # forward went on: with another answer the op may not raise
        plan = within_questions(plan, of_ops)
    plan = within_shapes(plan, Batches.of([size]), of_ops)
    # Only now: at a batch at which an op can't run, forward raises, even if nothing uses its result.
    return check(prune(plan))
