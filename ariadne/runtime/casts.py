"""Weights that autocast casts once for both sides of a cut.

The whole model has one cast copy of such a weight, adds up there what all ops that take it give, and casts back once. In one
block of autocast, two halves have the same copy. So its gradient waits, as that of a shared leaf does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from ariadne.errors import TrainingError
from ariadne.runtime.waiting import nodes_behind

_AccumulateGrad = torch._C._functions.AccumulateGrad
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


@cache
def _probe(device: str) -> torch.nn.Parameter:
    with torch.inference_mode(False):
        return torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float32, device=device))


def kept() -> Node | None:
    """A node that is the same one for as long as autocast keeps the casts that it holds now; None where it keeps none."""
    if not _is_any_autocast_enabled() or not torch.is_autocast_cache_enabled():
        return None
    device = next((d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)), None)
    if device is None:
        return None
    probe = _probe(device)
    with torch.enable_grad():
        node: Any = torch.mm(probe, probe).grad_fn
    return node.next_functions[0][0]  # type: ignore[no-any-return]


def refuse_other_casts(name: str, here: bool) -> None:
    """Raise `TrainingError` for a weight of both sides, of which each would have a cast copy of its own."""
    why = (
        "the block of autocast that the prefix ran in has ended, or casts were cleared"
        if here
        else "the boundary came over a wire"
    )
    raise TrainingError(
        f"autocast casts the parameter {name!r} once for both sides of the cut, and the whole model adds their gradients before it "
        f"casts back. Here {why}, so each side has a cast of its own. Run both in one process and inside one `with "
        "torch.autocast(...)`, or use torch.autocast(..., cache_enabled=False), or cut elsewhere"
    )


def casts_of_both(loss: torch.Tensor, graph: Iterable[Any]) -> list[GradientEdge]:
    """The casts of leaves that the graph of a loss and that of the prefix have in common."""
    common = nodes_behind(graph) & nodes_behind([loss])
    return [
        GradientEdge(node, 0)
        for node in common
        if node.name() == "ToCopyBackward0" and type(node.next_functions[0][0]) is _AccumulateGrad
    ]
