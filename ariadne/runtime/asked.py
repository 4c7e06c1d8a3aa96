"""Gradients that a loss function asks for by itself: those that lie behind the boundary would come as a share, or as None.

`torch.autograd.grad` and `backward(inputs=...)` name what they want. While a loss function runs, they are looked at: where what
they walk from leads to the boundary, and what they want lies behind it, the whole model would have walked on. So would it where
what they want crosses the boundary, and something else that crosses was computed from it. A hook on such a tensor, and
`retain_grad`, get the same share.
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
_USED_BEFORE = (
    "loss_fn {asks} {label!r}, which is made before the cut {split_id}, and {why}. The suffix has a share of its gradient. Cut "
    "directly after it, use the other outputs, or train the whole model with such a loss"
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
    named = _crossing(boundary)
    behind = _walked(prefix) if named is None else _walked(t for label, t in named.items() if label in labels)
    others = [
        t for t in wanted if isinstance(t, torch.Tensor) and t.requires_grad and type(t) is not torch.nn.Parameter
    ]
    if named is None and any(node_of(t) not in reached for t in others):  # an input; with allow_unused torch gives None
        raise TrainingError(NOT_HELD)
    for node in _walked_from(wanted):
        if isinstance(node, taps):
            _refuse_share(boundary, named, node.label, labels, "asks torch.autograd.grad for the gradient of")  # type: ignore[attr-defined]
        if node in behind:
            raise TrainingError(_SHARE if node in reached else NOT_HELD)


def refuse_hooked(boundary: BoundaryPayload, values: Iterable[Any], taps: type) -> None:
    """Raise `TrainingError` where a hook on a tensor that crosses, or its `.grad`, would get a share of the gradient."""
    for value in values:
        for t in (value,) if isinstance(value, torch.Tensor) else tree.leaves(value):
            if isinstance(t, torch.Tensor) and (t._backward_hooks or t.retains_grad):
                asks, node = "registers a hook on" if t._backward_hooks else "calls retain_grad() of", t.grad_fn
                if isinstance(node, taps):
                    _refuse_share(boundary, _crossing(boundary), node.label, boundary.requires_grad, asks)  # type: ignore[union-attr]


def watch_hooks(taps: type) -> None:
    """Have the nodes that stand at a boundary refuse hooks of a loss function, as tensors that cross do.

    A hook after such a node would see what it passes on, which is nothing, and not what the node of the whole model does.
    """

    def watched(name: str) -> Callable[..., Any]:
        own = getattr(taps, name)

        def register(self: Any, *args: Any) -> Any:
            at = getattr(_HERE, "at", None)
            if at is not None:
                boundary, asks = at[0], "registers a hook on the node of"
                if name == "register_hook":
                    why = "its node is the prefix's, which walks back later"
                    raise TrainingError(
                        _USED_BEFORE.format(asks=asks, label=self.label, split_id=boundary.split_id, why=why)
                    )
                _refuse_share(boundary, _crossing(boundary), self.label, boundary.requires_grad, asks)
            return own(self, *args)

        return register

    for name in ("register_hook", "register_prehook"):
        setattr(taps, name, watched(name))


def _crossing(boundary: BoundaryPayload) -> dict[str, torch.Tensor] | None:
    """The tensors of the prefix that cross, with their graph, by label; None where that is not here."""
    if boundary._graph is None:
        return None
    named: dict[str, torch.Tensor] = {}
    for label, value in zip(boundary.labels, boundary._graph, strict=True):
        named.update((label + at, t) for at, t in tree.paths(value) if isinstance(t, torch.Tensor))
    return named


def _refuse_share(
    boundary: BoundaryPayload, named: dict[str, torch.Tensor] | None, label: str, others: Iterable[str], asks: str
) -> None:
    others = {*others} - {label}
    if named is None and others:
        why = "other tensors cross with it, which may be computed from it: its graph is not here"
    elif named is not None and _lead_to([t for name, t in named.items() if name in others], named[label]):
        why = "used before the cut, too"
    else:
        return
    raise TrainingError(_USED_BEFORE.format(asks=asks, label=label, split_id=boundary.split_id, why=why))


def _lead_to(others: Iterable[torch.Tensor], t: torch.Tensor) -> bool:
    """Whether the graph of any of the other tensors leads to this one."""
    wanted = node_of(t), t.output_nr
    ahead: list[tuple[Any, int]] = [(node_of(o), o.output_nr) for o in others if o.requires_grad and o is not t]
    seen = set[Any]()
    while ahead:
        edge = ahead.pop()
        if edge == wanted:
            return True
        if edge[0] is not None and edge[0] not in seen:
            seen.add(edge[0])
            ahead += edge[0].next_functions
    return False


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
