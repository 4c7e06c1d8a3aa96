"""Gradients that wait: what the suffix's backward pass has for leaves to which the prefix's will add.

The whole model adds up all that a leaf gets before it accumulates once, and before any hook of the leaf sees it. Two backward
passes would accumulate twice. So what the first has for such a leaf is caught where it would be accumulated, and enters the
second as a root: autograd then adds in the order in which the whole does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ariadne import tree
from ariadne.errors import TrainingError
from ariadne.runtime.turns import TURNS

Shares = list[tuple[torch.Tensor | GradientEdge, torch.Tensor]]
_AccumulateGrad = torch._C._functions.AccumulateGrad
_task: Callable[[], int] = torch._C._current_graph_task_id


class Ends:
    """The nodes at which the graph of a loss meets that of the output it is made from; to be gone through when the loss is there.

    A view whose memory was written into gets its node when it is first asked for one. In the whole model that is in the loss: a
    node made before would have its turn later in the walk back, and gradients would be added in another order. So views are asked
    after the loss. One that the loss wrote into is passed over: what it leads to is walked through.
    """

    def __init__(self, output: Any) -> None:
        found = [output] if isinstance(output, torch.Tensor) else tree.leaves(output)
        tensors = [t for t in found if isinstance(t, torch.Tensor)]
        self._nodes = [t.grad_fn for t in tensors if not t._is_view()]
        self._views = [(t, t._version) for t in tensors if t._is_view()]

    def __iter__(self) -> Iterator[Node]:
        yield from (node for node in self._nodes if node is not None)
        yield from (t.grad_fn for t, version in self._views if t._version == version and t.grad_fn is not None)


def leaves_of(loss: torch.Tensor, stops: Iterable[Node]) -> list[torch.Tensor]:
    """The leaves to which the graph of `loss` leads otherwise than through `stops`: for most losses none."""
    return [node.variable for node in behind([loss], stops)]


def leaves_behind(nodes: Iterable[Node], stops: Iterable[Node]) -> list[torch.Tensor]:
    """The leaves to which some nodes lead otherwise than through `stops`."""
    return [node.variable for node in behind((), stops, nodes)]


def led_to(values: Iterable[Any], wanted: Iterable[torch.Tensor] | None) -> set[int]:
    """Those of some leaves, or of all where that is None, by id, to which the graph of any of the values leads."""
    ids = {id(leaf) for leaf in wanted} if wanted is not None else None
    if ids is not None and not ids:
        return set()
    found = {id(node.variable) for node in behind(_wanting(values), ())}
    return found if ids is None else found & ids


def rejoins(loss: torch.Tensor, stops: Iterable[Node], values: Iterable[Any], known: Iterable[Node] = ()) -> bool:
    """Whether the graph of `loss` leads, otherwise than through `stops`, to an op of the graph of one of the values.

    Ops that are `known` to be of both, whose gradients wait, don't count.
    """
    mine: set[Any] = set()
    behind([loss], stops, (), mine)
    return any(type(node) is not _AccumulateGrad for node in nodes_behind(values) & (mine - {*stops, *known}))


def nodes_behind(values: Iterable[Any]) -> set[Any]:
    """All nodes to which the graph of any of the values leads."""
    seen: set[Any] = set()
    behind(_wanting(values), (), (), seen)
    return seen


def arrivals(loss: torch.Tensor, node: Node) -> int:
    """How many ops of the graph of `loss` give a gradient to a node, which adds them up as they come."""
    seen: set[Any] = set()
    behind([loss], (), (), seen)
    return sum(onward is node for one in seen for onward, _ in one.next_functions)


def _wanting(values: Iterable[Any]) -> list[torch.Tensor]:
    return [t for t in tree.leaves(tuple(values)) if isinstance(t, torch.Tensor) and t.requires_grad]


def node_of(t: torch.Tensor) -> Node | None:
    """The node at which the gradient of a tensor that requires one arrives; a view made under no_grad has none."""
    if t.grad_fn is not None:
        return t.grad_fn
    with torch.enable_grad():  # as `get_gradient_edge` does, which fails for such a view
        view: Any = t.view_as(t).grad_fn
    return view.next_functions[0][0]  # type: ignore[no-any-return]


def behind(
    roots: Iterable[torch.Tensor], stops: Iterable[Node], nodes: Iterable[Node] = (), seen: set[Any] | None = None
) -> list[Any]:
    """The nodes that accumulate gradients to which the graph of any root, or of `nodes`, leads otherwise than through `stops`.

    All nodes that it meets, and `stops`, are put into `seen`.
    """
    seen = set() if seen is None else seen
    seen.update(stops)
    ahead: list[Any] = [*map(node_of, roots), *nodes]
    found = []
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node) is _AccumulateGrad:
            found.append(node)
        else:
            for onward, _ in node.next_functions:
                ahead.append(onward)
    return found


@contextmanager
def caught(
    root: torch.Tensor | Sequence[torch.Tensor],
    waiting: Iterable[torch.Tensor],
    noted: Iterable[torch.Tensor],
    casts: Iterable[GradientEdge] = (),
) -> Iterator[tuple[Shares, Shares]]:
    """While in the block, a backward pass from `root`, or from several, puts what it has for some leaves into two lists.

    For those `waiting`, and for `casts` of them, nothing is accumulated, and none of their hooks runs; for those `noted` all goes
    on as it would.
    Passes of other threads through what Ariadne split wait for the end of the block; any other goes on, but doesn't see the hooks
    of leaves that wait. Passes within this one, as a reentrant checkpoint starts them, go on as they would: what they give is
    accumulated at once in the whole model too, and is noted.
    """
    found: tuple[Shares, Shares] = [], []
    mine: list[int] = []
    here = threading.get_ident()
    roots = [root] if isinstance(root, torch.Tensor) else root
    handles = [get_gradient_edge(r).node.register_prehook(lambda _: mine.append(_task())) for r in roots]

    def catch(leaf: torch.Tensor, into: Shares, instead: tuple[None] | None) -> Callable[..., Any]:
        def hook(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
            inner = _task() not in mine
            if inner and threading.get_ident() != here:
                return None
            if inner and id(leaf) in hooked:
                raise TrainingError(
                    f"a backward pass within that of the loss, as a reentrant checkpoint starts it, reaches a parameter (shape "
                    f"{tuple(leaf.shape)}) that waits for the prefix's part of its gradient and has hooks, which would have to run "
                    "twice. Use torch.utils.checkpoint with use_reentrant=False, or remove the hooks"
                )
            if gradients[0] is not None:
                (found[1] if inner else into).append((leaf, gradients[0]))
            return None if inner else instead

        return hook

    def catch_cast(edge: GradientEdge) -> Callable[..., Any]:
        def hook(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
            if _task() not in mine:
                return None
            if gradients[0] is not None:
                found[0].append((edge, gradients[0]))
            return (None,)

        return hook

    waiting = list(waiting)
    with without_hooks(waiting) as hooked:
        try:
            for leaves, into, instead in ((waiting, found[0], (None,)), (noted, found[1], None)):
                for leaf in leaves:
                    handles.append(get_gradient_edge(leaf).node.register_prehook(catch(leaf, into, instead)))
            for edge in casts:
                handles.append(edge.node.register_prehook(catch_cast(edge)))
            yield found
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def without_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[set[int]]:
    """Without the gradient hooks and the post-accumulate hooks of some leaves, and without those of the nodes that accumulate
    their gradients, as apex and FSDP put there; no other thread walks back meanwhile. Gives the leaves that have some, by id."""
    leaves = list(leaves)
    hidden = [
        (leaf, name, hooks)
        for leaf in leaves
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(leaf, name))
    ]
    emptied: list[tuple[torch.Tensor, dict[Any, Any], dict[Any, Any]]] = []
    with TURNS.alone():
        try:
            for one, name, _ in hidden:
                setattr(one, name, OrderedDict())
            for leaf in leaves:
                for table in _hooks_of_node(leaf):
                    emptied.append((leaf, table, {**table}))
                    table.clear()
            yield {id(leaf) for leaf, *_ in (*hidden, *emptied)}
        finally:
            for _, table, hooks in emptied:
                table.update(hooks)
            for leaf, name, hooks in hidden:
                setattr(leaf, name, hooks)


def _hooks_of_node(leaf: torch.Tensor) -> list[dict[Any, Any]]:
    """The tables of the hooks on the node that accumulates a leaf's gradient: torch shows them to those who register one more."""
    node = node_of(leaf) if leaf.requires_grad and leaf.is_leaf else None
    if node is None:
        return []
    handles = [node.register_prehook(_nothing), node.register_hook(_nothing)]
    tables = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return [table for table in tables if table]


def _nothing(*_: Any) -> None:
    """A hook that changes nothing."""
