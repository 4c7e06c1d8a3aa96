"""Taps: where a training run of the suffix begins, at copies of what crosses that carry no graph."""

from __future__ import annotations

from typing import Any

import torch

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import TrainingError

Gradients = dict[str, torch.Tensor | None]
with torch.inference_mode(False):
    # A tap is in the graph only if something that it takes requires a gradient; this never gets one.
    ANCHOR = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


class Tap(torch.autograd.Function):
    """Gives a boundary tensor to the suffix, and keeps the gradient that comes back just as it came.

    A leaf would do too, but accumulating into a leaf lays its gradient out anew, and kernels may follow the layout.
    """

    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, anchor: torch.Tensor, label: str, kept: Gradients, walking: list[bool]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.label, ctx.kept, ctx.walking = label, kept, walking
        return t.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, None, None, None]:
        if not ctx.walking:
            raise TrainingError(
                "loss_fn runs a backward pass of its own, which reaches the boundary: in the whole model it would go on into the "
                "prefix, whose gradients would be there at once. Return the sum of the losses instead, and let train_suffix walk "
                "back once; or take gradients by torch.autograd.grad with respect to the output"
            )
        ctx.kept[ctx.label] = gradient
        return None, None, None, None, None


def carried(labels: tuple[str, ...], raw: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """What a training boundary holds: the values without their graph, and the labels of those that want a gradient.

    One tensor under several labels (`to` and `contiguous` may give back what they got) stays one tensor. One that has no graph
    is carried as it is: forward may return it, and a loss may ask whether that is the very input.
    """
    if len(raw) == 1 and isinstance(raw[0], torch.Tensor):
        return ((raw[0].detach(),), labels) if raw[0].requires_grad else (raw, ())
    values, wanting = [], []
    bare: dict[int, torch.Tensor] = {}

    def detached(t: Any) -> Any:
        return bare.setdefault(id(t), t.detach()) if isinstance(t, torch.Tensor) and t.requires_grad else t

    for label, value in zip(labels, raw, strict=True):
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                wanting.append(label)
            values.append(detached(value))
        else:
            wanting += [label + at for at, t in tree.paths(value) if isinstance(t, torch.Tensor) and t.requires_grad]
            values.append(tree.map_leaves(detached, value))
    return tuple(values), tuple(wanting)


def tapped(boundary: BoundaryPayload, walking: list[bool]) -> tuple[list[Any], Gradients]:
    """The boundary's values for a training run of the suffix, and the dict that its gradients will be put into.

    Until `walking` holds something, none may come. The gradient of a tensor that crosses under several labels comes under the
    first: autograd adds up as for one tensor.
    """
    kept: Gradients = {}
    taps: dict[int, torch.Tensor] = {}
    wanting = boundary.requires_grad

    def take(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kept[name] = None
        if name not in wanting:  # where it requires a gradient by now, that was asked for after forward read it
            return value.detach() if value.requires_grad else value
        tap = taps.get(id(value))
        if tap is None:
            tap = taps[id(value)] = Tap.apply(value, ANCHOR, name, kept, walking)
        return tap

    values = []
    for label, value in zip(boundary.labels, boundary.raw, strict=True):
        if isinstance(value, torch.Tensor):
            values.append(take(label, value))
        else:
            leaves, spec = tree.flatten(value)
            names = [label + at for at, _ in tree.paths(value)]
            values.append(tree.unflatten([take(n, v) for n, v in zip(names, leaves, strict=True)], spec))
    return values, kept
