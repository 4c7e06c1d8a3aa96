"""Gradients where the graph of a run meets a graph of the caller's, which is not walked into: not a node of it runs.

Autograd's engine goes from a loss to the tensors that are asked for, by all ways. A leaf that a run reads, and that the caller
made a weight of as well, lies behind that weight, too: to ask for its gradient would walk through the caller's graph, free it, and
run its hooks. So gradients are asked for one op earlier, where they arrive at the ops that read such a tensor, and these ops are
called by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ariadne.runtime.waiting import behind

Place = tuple[Any, int]


def gradients_met(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], made: Sequence[GradientEdge]
) -> list[torch.Tensor | None]:
    """The gradients of some leaves, then those that arrive where tensors were `made` elsewhere; of what lies behind these, nothing.

    So a leaf has what the run itself gives it. No hook of a tensor that was made elsewhere runs, and its `grad` stays.
    """
    stops = {edge.node for edge in made}
    own, beyond = set[Any](), set[Any]()
    behind([loss], stops, seen=own)
    behind((), (), [onward for stop in stops for onward, _ in stop.next_functions if onward is not None], beyond)
    edges = [get_gradient_edge(leaf) for leaf in leaves]
    ends = [*edges, *made]
    by_hand: dict[Place, torch.Tensor | None] = {_place(e): None for e in ends if e.node in stops or e.node in beyond}
    readers = [n for n in own - stops - beyond if any(place in by_hand for place in n.next_functions)]
    readers.sort(key=lambda n: n._sequence_nr(), reverse=True)  # as the engine takes them
    asked = {_place(e): e for e in ends if _place(e) not in by_hand}
    arriving = [GradientEdge(n, i) for n in readers for i in range(len(n._input_metadata))]
    # After the hooks of forward's own, which the engine runs before it calls an op, but after it notes what was asked for.
    called: dict[Node, Sequence[torch.Tensor | None]] = {}
    handles = [n.register_prehook(lambda given, n=n: called.__setitem__(n, given)) for n in readers]
    try:
        wanted: list[Any] = [*asked.values(), *arriving]
        found = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True) if wanted else ()
    finally:
        for handle in handles:
            handle.remove()
    direct = dict(zip(asked, found, strict=False))
    rest = iter(found[len(asked) :])
    with torch.no_grad():
        for n in readers:
            given = [next(rest) for _ in n._input_metadata]
            for place, gradient in zip(n.next_functions, _called(n, called.get(n, given)), strict=False):
                if place in by_hand and gradient is not None:
                    by_hand[place] = _added(by_hand[place], gradient, place)
    return [direct[_place(e)] if _place(e) in direct else by_hand[_place(e)] for e in ends]


def _place(edge: GradientEdge) -> Place:
    return edge.node, edge.output_nr


def _called(node: Any, gradients: Sequence[torch.Tensor | None]) -> Iterable[torch.Tensor | None]:
    """What an op gives back for each of its inputs, as the engine would have it."""
    if all(g is None for g in gradients):
        return ()
    metadata = node._input_metadata
    if not isinstance(node, BackwardCFunction):
        return _several(node(*gradients))
    of_function: Any = node
    whole = [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
        for g, m in zip(gradients, metadata, strict=True)
    ]
    # One for each argument, of which only tensors have an edge.
    pairs = zip(_several(of_function.apply(*whole)), of_function.needs_input_grad, strict=False)
    found = iter([gradient for gradient, wants in pairs if wants])
    return [None if onward is None else next(found, None) for onward, _ in of_function.next_functions]


def _several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _added(before: torch.Tensor | None, gradient: torch.Tensor, place: Place) -> torch.Tensor:
    """A sum, of the sizes of the tensor that it is for: an op may give more where it read one by broadcasting."""
    shape = place[0]._input_metadata[place[1]].shape
    if gradient.layout is torch.strided and not gradient.is_nested and gradient.shape != shape:
        gradient = gradient.sum_to_size(shape)
    return gradient if before is None else before + gradient
