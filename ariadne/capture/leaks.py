"""Leaks: data that leave torch unseen and come back, or that stay where the model does not reach, are refused."""

from __future__ import annotations

from ariadne.capture.generalize import (
    unexplained,
)
from ariadne.compare import difference
from ariadne.errors import UnsupportedError
from ariadne.plan import (
    TracePlan,
)

_LEAKS = (
    "forward takes data out of torch unseen (by dlpack, a storage, a pointer, deepcopy, or another thread) and brings them back as "
    "a tensor, a number or a branch, which a plan would freeze; keep to torch's own ops, or read numbers by item() or tolist()."
)


def refuse_leaks(plan: TracePlan, seen: TracePlan) -> None:
    """Raise `UnsupportedError` if forward does something else where the inputs hold other numbers, and no number that it was
    seen to read out of a tensor says why."""
    differs = unexplained(plan, seen)
    if differs:
        raise UnsupportedError(f"{_LEAKS} On inputs with other numbers: {differs}")


def refuse_unlike_constants(plan: TracePlan, seen: TracePlan) -> None:
    """Raise `UnsupportedError` if tensors that no op made are others where the inputs hold other numbers."""
    pairs = zip(plan.constants.values(), seen.constants.values(), strict=False)
    if len(plan.constants) != len(seen.constants) or not all(difference(a, b) is None for a, b in pairs):
        raise UnsupportedError(f"{_LEAKS} On inputs with other numbers a tensor that no op made is another one")


def refuse_kept_data(first: TracePlan, again: TracePlan) -> None:
    """Raise `UnsupportedError` if a later run on the same inputs lacks ops of the first that compute from data: their results are
    kept where the model does not reach. What was made from sizes alone may be kept."""
    if _computes(first) != _computes(again):
        raise UnsupportedError(
            "forward keeps what it computed from its inputs for later calls, outside of the model (functools.cache, a closure, an "
            "attribute of a function), which a plan can't follow; keep it in a buffer, or compute it anew"
        )


def _computes(plan: TracePlan) -> list[str]:
    """The ops of a plan whose results follow inputs, state or random numbers."""
    follows = {name for _, name in plan.inputs} | {name for name, value in plan.values.items() if value.is_state}
    found = []
    for node in plan.nodes:
        if node.seeded or not follows.isdisjoint(node.reads):
            follows.update(node.outputs)
            found.append(node.target)
    return found
