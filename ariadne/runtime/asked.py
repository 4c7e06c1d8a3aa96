"""Gradients that a loss function asks for by itself: those that lie behind the boundary would come as a share, or as None.

`torch.autograd.grad` and `backward(inputs=...)` name what they want. While a loss function runs, they are looked at: where what
they walk from leads to the boundary, and what they want lies behind it, the whole model would have walked on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import TrainingError
from ariadne.forks import rlock
from ariadne.runtime.waiting import node_of

NOT_HELD = (
    "loss_fn asks torch.autograd.grad for gradients with respect to something that the graph of the loss does not hold. That graph "
    "ends at the boundary: inputs of the model and parameters of the prefix lie behind it. Take gradients with respect to the "
    "output or to runtime.suffix_parameters(), or train the whole model with such a loss"
)
_SHARE = (
    "loss_fn asks torch.autograd.grad for the gradient of a parameter that both sides use, and would get the suffix's share alone. "
    "Take gradients with respect to the output, or to parameters of the suffix alone, or train the whole model with such a loss"
)
_autograd: Any = torch.autograd
_HERE = (
    threading.local()
)  # the boundary whose loss function this thread runs, and the class of the nodes that stand at it
_PATCHING = rlock()
_plain: list[Callable[..., Any]] = []  # torch's own, once for each loss function that runs now


class KeptWhole:
    """A block that raises `TrainingError` where a pass of this thread asks for a gradient of what lies behind the boundary.

    `taps` is the class of the nodes at which the suffix's graph ends; each has the label of what it stands for. `prefix` holds the
    prefix's parameters, which are all that can be told of its graph where the boundary came as bytes.
    """

    __slots__ = ("at", "before")

    def __init__(self, boundary: BoundaryPayload, taps: type, prefix: Sequence[torch.Tensor]) -> None:
        self.at = boundary, taps, prefix

    def __enter__(self) -> None:
        self.before = getattr(_HERE, "at", None)
        with _PATCHING:
            _plain.append(_plain[0] if _plain else _autograd._engine_run_backward)
            _autograd._engine_run_backward = _watched
        _HERE.at = self.at

    def __exit__(self, *_: object) -> None:
        _HERE.at = self.before
        with _PATCHING:
            own = _plain.pop()
            if not _plain:
                _autograd._engine_run_backward = own


_torchs_own = _autograd._engine_run_backward


def _watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own, of the same arguments: what to walk from, gradients, two flags, and what is wanted."""
    at = getattr(_HERE, "at", None)
    if at is not None and len(args) > 3 and args[3]:
        _refuse_behind(outputs, args[3], *at)
    run = next(iter(_plain), _torchs_own)  # the block of another thread may have ended just now
    return run(outputs, *args, **kwargs)


def _refuse_behind(
    outputs: Any, wanted: Any, boundary: BoundaryPayload, taps: type, prefix: Sequence[torch.Tensor]
) -> None:
    reached = _walked(outputs)
    labels: set[str] = {node.label for node in reached if isinstance(node, taps)}  # type: ignore[attr-defined]
    if not labels:
        return
    if boundary._graph is None:
        behind = _walked(prefix)
    else:
        named: list[tuple[str, Any]] = []
        for label, value in zip(boundary.labels, boundary._graph, strict=True):
            named += [(label + at, t) for at, t in tree.paths(value)]
        behind = _walked(t for label, t in named if label in labels and isinstance(t, torch.Tensor))
    for node in _walked_from(wanted):
        if node in behind:
            raise TrainingError(_SHARE if node in reached else NOT_HELD)


def _walked_from(things: Iterable[Any]) -> list[Any]:
    """The nodes of tensors that require gradients, and of edges."""
    return [
        t.node if isinstance(t, GradientEdge) else node_of(t)
        for t in things
        if not isinstance(t, torch.Tensor) or t.requires_grad
    ]


def _walked(things: Iterable[Any]) -> set[Node]:
    """All nodes to which the graph of any of them leads."""
    ahead, seen = _walked_from(things), set[Any]()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [onward for onward, _ in node.next_functions]
    return seen
