"""A walk back in two: first to what came into a part, which the part before waits for; then to the part's own parameters.

Zero-bubble schedules are made of it. torch's engine tells where the two part in the graph: at the nodes that lie on a way to
what came
in and have parameters beside them. The first walk keeps the gradients that arrive there, the second starts from these. Where each
parameter is used once, both together give what one walk gives, bit for bit; elsewhere the first walk does all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

from ariadne.pipeline.flight import Flight, roots_of
from ariadne.pipeline.part import Part
from ariadne.runtime import leaves_of, taps, training


@dataclass
class Later:
    """The second walk: groups of parameters with the nodes where it starts, and parameters to which no way leads from there."""

    groups: list[dict[str, Any]]
    roots: list[torch.Tensor]
    given: list[torch.Tensor]
    left: list[torch.Tensor]

    def finish(self) -> None:
        """Walk to the parameters, and add to their gradients."""
        with training.no_autocast():
            for group in self.groups:
                _walk(group)
            if self.left:
                torch.autograd.backward(self.roots, self.given, inputs=self.left)
        self.groups, self.roots, self.given = [], [], []


def halves_well(part: Part, flight: Flight, loss: Any, shares: Mapping[str, torch.Tensor]) -> bool:
    """Whether a walk may go in two: no parameter is used twice, shared with another part, reached by the loss itself or has
    hooks."""
    if shares or part.tied or not flight.taken or not part.reads_once:
        return False
    if flight.gives is None and (not isinstance(loss, torch.Tensor) or leaves_of(loss, flight.ends)):
        return False
    return not any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in part.parameters())


def back_to_inputs(
    flight: Flight, loss: Any, gradients: Mapping[str, torch.Tensor | None], part: Part
) -> tuple[taps.Gradients, Later]:
    """The first walk: the gradients of what came in, and what is to be done later."""
    roots, given = roots_of(flight, loss, gradients)
    if not roots:
        return dict.fromkeys(flight.labels), Later([], [], [], [])
    edges = [get_gradient_edge(t) for t in roots]
    nodes = [get_gradient_edge(p).node for p in part.parameters() if p.requires_grad]
    ways = construct_reverse_graph([e.node for e in edges])
    nodes = [n for n in nodes if n in ways]
    groups = get_param_groups([t.grad_fn for t in flight.taken if t.grad_fn in ways], nodes, ways)
    handles = []
    try:
        for group in groups:
            group["intermediates"] = [*group["intermediates"]]
            group["grads"] = [None] * len(group["intermediates"])
            for i, node in enumerate(group["intermediates"]):
                handles.append(node.register_prehook(_kept(group["grads"], i)))
        with training.no_autocast():
            found = torch.autograd.grad(edges, flight.taken, given, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    reached = {id(n) for group in groups for n in group["params"]}
    left = [n.variable for n in nodes if id(n) not in reached]  # type: ignore[attr-defined]
    return dict(zip(flight.labels, found, strict=True)), Later(
        groups, roots if left else [], given if left else [], left
    )


def _kept(into: list[Any], i: int) -> Any:
    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        into[i] = gradients

    return keep


def _walk(group: dict[str, Any]) -> None:
    """From the nodes of a group to its parameters."""
    edges, given, handles = [], [], []
    pairs = [
        (node, kept) for node, kept in zip(group["intermediates"], group["grads"], strict=True) if kept is not None
    ]
    for node, kept in pairs:
        for i, gradient in enumerate(kept):
            if gradient is not None:
                edges.append(GradientEdge(node, i))
                given.append(gradient)
    if not edges:
        return
    try:
        if len(pairs) > 1:  # one may lie behind another, whose walk would come by: what is kept counts, once
            for node, kept in pairs:
                handles.append(node.register_prehook(lambda _, kept=kept: kept))
        nodes = [*group["params"]]
        found = torch.autograd.grad(
            edges, [GradientEdge(n, 0) for n in nodes], given, retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    for node, gradient in zip(nodes, found, strict=True):
        if gradient is not None:
            accumulate(node.variable, gradient)


def accumulate(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a leaf's gradient as autograd does: the first one is laid out as the leaf, in memory of its own."""
    with torch.no_grad():
        if leaf.grad is None:
            if gradient.layout is torch.strided and torch.empty_like(leaf).stride() == leaf.stride():
                leaf.grad = torch.empty_like(leaf).copy_(gradient)
            else:
                leaf.grad = gradient.clone(memory_format=torch.contiguous_format)
        elif gradient.is_sparse or leaf.grad.is_sparse:
            leaf.grad = leaf.grad + gradient
        else:
            leaf.grad.add_(gradient)
