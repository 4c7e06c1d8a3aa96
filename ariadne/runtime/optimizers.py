"""Optimizers of the two sides: cleared and stepped as torch does it, without the notes that nobody takes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ariadne.errors import TrainingError
from ariadne.runtime.waiting import without_hooks

_profiler_enabled = torch._C._autograd._profiler_enabled
# That of torch's wrapper around each `step`, which runs the hooks and takes a note for the profiler. Others look like it: whoever
# wraps it once more by `functools.wraps` copies its attributes.
_NOTED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def refuse_other(optimizer: Any) -> None:
    """Raise `TrainingError` for what is no optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        lacks = [n for n in ("param_groups", "step") if not hasattr(optimizer, n)]
        if lacks or isinstance(optimizer, type):
            found = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else repr(type(optimizer).__name__)
            without = f" without {', '.join(lacks)}" if lacks else ""
            raise TrainingError(
                f"optimizer must be one of torch.optim's, or have what these have: param_groups, zero_grad and step; found {found}"
                f"{without}. Pass the optimizer of this side's parameters, or none"
            )
    if _needs_more(getattr(type(optimizer), "step", None)):
        name = type(optimizer).__name__
        raise TrainingError(
            f"{name}.step() needs a closure that computes the loss anew, and one side of a split has none. Call train_suffix "
            "and backward_prefix with optimizer=None, inside of a closure that clears the gradients, runs run_training_prefix and "
            f"both of them and returns the loss; then call {name}.step(closure) on an optimizer of the parameters of both sides"
        )


@lru_cache(maxsize=64)
def _needs_more(step: Any) -> bool:
    """Whether a `step` of a class can't be called without arguments, as that of `torch.optim.LBFGS`."""
    try:
        parameters = [*inspect.signature(step).parameters.values()][1:]
    except (TypeError, ValueError):  # none of Python's
        return False
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _own_of(optimizer: Any) -> dict[str, Any]:
    return getattr(optimizer, "__dict__", {})  # an object with slots has none


def clear(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.zero_grad(set_to_none=True)`; without the profiler's note of it, where it is torch's own."""
    own = getattr(type(optimizer), "zero_grad", None) is not torch.optim.Optimizer.zero_grad
    if own or "zero_grad" in _own_of(optimizer):
        return optimizer.zero_grad(set_to_none=True)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = None


def clear_but(
    optimizer: torch.optim.Optimizer, keep: Collection[int], noted: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Clear the gradients of what an optimizer owns, save what this round's suffix has put there."""
    cleared = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in keep:
                p.grad = None
                cleared.add(id(p))
    again = [(p, g) for p, g in noted if id(p) in cleared]
    if again:
        with without_hooks([p for p, _ in again]):  # they have run
            torch.autograd.backward([p for p, _ in again], [g for _, g in again])


def step(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Step an optimizer, by way of the scaler if there is one.

    Without the profiler's note of it where nothing watches: it takes an eighth of a small optimizer's step, and there are two.
    """
    if scaler is not None:
        scaler.step(optimizer)
        return
    found, mine = getattr(type(optimizer), "step", None), _own_of(optimizer)
    watched = (
        getattr(found, "__code__", None) is not _NOTED
        or "step" in mine  # a scheduler counts the steps
        or mine.get("_optimizer_step_pre_hooks")
        or mine.get("_optimizer_step_post_hooks")
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or _profiler_enabled()
    )
    if watched:
        optimizer.step()
    else:
        _stepping(found)(optimizer)


def _stepping(noted: Any) -> Any:
    """What torch's wrapper calls; its `__wrapped__` says something else where `functools.update_wrapper` has renamed it."""
    return noted.__closure__[_NOTED.co_freevars.index("func")].cell_contents
