"""Hooks over the parameters of both sides, as `torch.autograd.graph.register_multi_grad_hook` makes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch

from ariadne.errors import TrainingError

_hooks_of = attrgetter("_backward_hooks")


def _codes_in(code: CodeType) -> set[CodeType]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {*inner}.union(*map(_codes_in, inner))


# The functions that torch puts on each of the tensors, for both of its modes.
_EACH = {
    code
    for code in _codes_in(torch.autograd.graph.register_multi_grad_hook.__code__)
    if code.co_name in ("inner_hook", "wrapped_fn")
}


def refuse_hooks_of_both(prefix: Sequence[torch.Tensor], suffix: Sequence[torch.Tensor]) -> None:
    """Raise `TrainingError` where one hook waits for the gradients of parameters of both sides.

    Whole, the model calls it once in a step; the halves walk back one after the other, and each would call it with its own.
    """
    if not (any(map(_hooks_of, suffix)) and any(map(_hooks_of, prefix))):
        return
    known = {id(p) for p in prefix}
    if _joint([p for p in prefix if p.requires_grad]) & _joint([p for p in suffix if id(p) not in known]):
        raise TrainingError(
            "a hook waits for the gradients of parameters before the cut and of others after it (register_multi_grad_hook): the "
            "halves walk back one after the other, and would call it once each, with a part of the gradients. Register one for the "
            "parameters of each half, or hooks of single parameters, or read the gradients after backward_prefix"
        )


def _joint(parameters: Collection[torch.Tensor]) -> set[int]:
    """What tells the hooks of several tensors that stand on these from each other."""
    hooks = [hook for p in parameters for hook in (p._backward_hooks or {}).values()]
    return {_shared(hook) for hook in hooks if isinstance(hook, FunctionType) and hook.__code__ in _EACH}


def _shared(hook: FunctionType) -> int:
    """By identity, what torch's functions for the tensors of one such hook have in common."""
    cells: dict[str, Any] = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return id(cells.get("buffer", hook))
