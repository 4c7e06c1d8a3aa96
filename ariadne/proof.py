"""Proof: a plan, cut, is held against the model before it serves a call: outputs and gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import Captured, Example
from ariadne.errors import VerificationError
from ariadne.plan import TracePlan
from ariadne.scripted import is_scripted
from ariadne.state import Snapshot
from ariadne.strided import own
from ariadne.variant import Variant
from ariadne.verify import difference

AT_FAULT = (
    "Forward may do what no op shows (`t.data = ...`, `apply_`, a generator that it seeds): write that with torch's ops. If "
    "it does not, gives the same result twice on the same input, and follows nothing outside of itself, such as a variable of an "
    "enclosing function, this is a bug in Ariadne"
)
_ROUNDS = 3  # in which a scripted function must have come to what it stays at, in both


def prove(model: nn.Module, variant: Variant, captured: Captured, example: Example, *, trains: bool) -> None:
    """Raise `VerificationError` unless the variant gives what the model gave while it was captured.

    And, where it `trains`, the gradients that the model has. Both run on inputs like `example`; the model and the generators are
    left as found.
    """
    settings = variant.settings
    if settings.mode == "compiled":  # in its own rounding: what it is made from is held against the model
        plain = replace(settings, mode="generated_eager", compile_options=None)
        plan, candidates, baseline = variant.plan, variant.candidates, captured.baseline
        variant = Variant(plan, candidates, variant.candidate, model, baseline, plain)
    for seen in captured.evidence:
        if seen.batch in captured.plan.batches:
            _prove_output(model, variant, example, seen.batch, seen.output)
    if trains:
        _prove_gradients(model, variant, example)


def _rounds(plan: TracePlan) -> int:
    return _ROUNDS if any(map(is_scripted, plan.nodes)) else 1


def _run(
    run: Callable[..., Any], model: nn.Module, plan: TracePlan, example: Example, batch: int, grad: bool,
    then: Callable[[Any], Any],
) -> Any:  # fmt: skip
    """What `then` makes of one run on inputs of a batch, with everything put back after."""
    snapshot = Snapshot(model)
    snapshot.save_written(plan)
    args, kwargs = tree.unflatten(example.resized(batch), example.spec)
    try:
        with torch.set_grad_enabled(grad):
            return then(run(*args, **kwargs))
    finally:
        snapshot.restore(any(node.seeded for node in plan.nodes))


def _prove_output(model: nn.Module, variant: Variant, example: Example, batch: int, output: Any) -> None:
    plan, wrong = variant.plan, None
    for left in reversed(range(_rounds(plan))):
        found = _run(variant.joined, model, plan, example, batch, plan.grad_enabled, _detached)
        wrong = difference(output, found)
        if not wrong:
            return
        if left:
            output = _run(model, model, plan, example, batch, plan.grad_enabled, _detached)
    raise VerificationError(
        f"at batch {batch} the split at {variant.candidate.split_id} differs from the model: {wrong}. {AT_FAULT}"
    )


def _detached(output: Any) -> Any:
    return tree.map_leaves(lambda t: own(t.detach()) if isinstance(t, torch.Tensor) else t, output)


def _prove_gradients(model: nn.Module, variant: Variant, example: Example) -> None:
    """Hold the gradients of all parameters, through both halves, against the model's own."""
    batch, parameters = _trained_at(variant.plan, example), [p for p in model.parameters() if p.requires_grad]
    wrong = None
    for _ in range(_rounds(variant.plan)):
        whole = _run(model, model, variant.plan, example, batch, True, lambda out: _gradients(out, parameters))
        if whole is None:  # there is nothing to hold them against; who trains it is told the same
            return
        split = _run(variant.joined, model, variant.plan, example, batch, True, lambda out: _gradients(out, parameters))
        wrong = difference(whole, split)
        if not wrong:
            return
    raise VerificationError(
        f"the gradients through the split at {variant.candidate.split_id} differ from the model's at batch {batch}: {wrong}. "
        "Forward may change gradients in a way that ops don't show (hooks on tensors or graph nodes): move it outside, or pass "
        "trainable=False if it need not train"
    )


def _gradients(output: Any, parameters: list[nn.Parameter]) -> Any:
    """Those of a loss in which each element of the output has a weight of its own; None where torch can't take them."""
    leaves = [t for t in tree.leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    losses = [_weighed(torch.view_as_real(t) if t.is_complex() else t) for t in leaves]
    if not losses:
        return ()
    loss: Any = sum(losses)
    try:
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    except RuntimeError:  # as a reentrant checkpoint does, which takes no part in `grad`
        found = _by_backward(loss, parameters)
    return None if found is None else [(str(g.layout), g.to_dense()) if g is not None else None for g in found]


def _weighed(t: torch.Tensor) -> torch.Tensor:
    return (t.float() * torch.arange(t.numel(), device=t.device).view(t.shape).cos()).sum()


def _by_backward(loss: torch.Tensor, parameters: list[nn.Parameter]) -> Any:
    """The gradients that `backward` leaves, with no hook told of it; the snapshot around puts the old ones back."""
    tables: list[dict[Any, Any]] = [p._post_accumulate_grad_hooks or {} for p in parameters]
    hooks = [dict(table) for table in tables]
    try:
        for p, table in zip(parameters, tables, strict=True):
            p.grad = None
            table.clear()
        loss.backward()
        return [p.grad for p in parameters]
    except RuntimeError:
        return None
    finally:
        for table, hook in zip(tables, hooks, strict=True):
            table.update(hook)


def _trained_at(plan: TracePlan, example: Example) -> int:
    """The batch at which gradients are compared: the example's, but above 1 where the plan serves more."""
    served = plan.batches
    return next(b for b in (max(2, example.batch), example.batch, *reversed(served.ranges[-1])) if b in served)
