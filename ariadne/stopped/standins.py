"""Leaves that stand in for tensors which a graph of the caller's made: a proof doesn't walk into that, nor runs its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ariadne.capture import Snapshot
from ariadne.errors import TrainingError, UnsupportedError
from ariadne.runtime import led_to, nodes_behind


class _StandIn(torch.autograd.Function):
    """The same data, as the result of an op, for forward may write into what it holds; `over` once the proof is."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, over: list[bool]) -> torch.Tensor:
        ctx.over = over
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.over:
            raise TrainingError(
                f"a tensor that a graph of yours made (shape {tuple(gradient.shape)}) was read while a Python split was held "
                "against the model in another thread, and its gradient can't reach that graph. Run the step again; to avoid it, "
                "prepare with SplitSpec(..., trainable=True), before other threads run the model"
            )
        return gradient, None


def older_nodes(loss: torch.Tensor | None, began: int) -> set[Any]:
    """The nodes of a loss's graph by whose numbers a thread made them before it had made so many."""
    nodes = nodes_behind(() if loss is None else [loss])
    return {node for node in nodes if node is not None and node._sequence_nr() < began}


def refuse_met_again(nodes: set[Any]) -> None:
    """Raise `UnsupportedError` where two runs' graphs have nodes in common, which no run made, and a walk frees these.

    A node that saves nothing can be walked through again, as that of a cast which autocast keeps.
    """
    for node in filter(_saves, nodes):
        raise UnsupportedError(
            f"forward reads a tensor that a graph of yours made, by {node.name()}, from where nothing can stand in for it, such as "
            "a variable of an enclosing function: it can't be held against the model without walking through your graph, which can "
            "be done once. Put the tensor into an attribute of a module or a list"
        )


def _saves(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) or any(name.startswith("_raw_saved_") for name in dir(node))


class Standing(dict[str, torch.Tensor]):
    """The leaves that stand in, by name; and the tensors that were `made` elsewhere, each with its leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def refuse_joined(self, loss: torch.Tensor) -> None:
        """Raise `UnsupportedError` where a sum of gradients in the caller's graph has parts from several ways through forward.

        Forward runs in a thread of its own, and autograd orders nodes by numbers of each thread: the parts of such a sum would come
        in another order than in the whole model, and round otherwise. What forward puts another in the place of, as the weight that
        an old `weight_norm` left, has no part in it.
        """
        read, seen = led_to([loss], None), set[Any]()
        for t, leaf in self.made:
            if id(leaf) not in read:
                continue
            nodes = nodes_behind([t])
            if nodes & seen or read & {id(getattr(node, "variable", None)) for node in nodes}:
                raise UnsupportedError(
                    f"a tensor that a graph of yours made (shape {tuple(t.shape)}) comes from a tensor that forward reads, too, or "
                    "from where another one does: the gradients that meet there are added up in another order than in the whole "
                    "model, since forward runs in a thread of its own. Make it inside of forward, or train the whole model"
                )
            seen |= nodes


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[Standing]:
    """Within the block, leaves in the place of the tensors with a graph that the model holds or its functions reach; gives them.

    Who calls puts back what the model holds, as `isolated` does.
    """
    standing, leaves, over = dict[int, torch.Tensor](), Standing(), list[bool]()

    def instead(t: torch.Tensor) -> torch.Tensor:
        if t.grad_fn is None or type(t) is not torch.Tensor:
            return t
        if id(t) not in standing:
            leaf = leaves[f"the tensor {len(leaves)} that was made outside of forward"] = t.detach().requires_grad_()
            standing[id(t)] = made = _StandIn.apply(leaf, over)
            made.__dict__.update(t.__dict__)
            standing[id(made)] = made  # where it is met again
            leaves.made.append((t, leaf))  # so that ids are of these alone
        return standing[id(t)]

    with torch.enable_grad():
        Snapshot(model).replace(instead)
    try:
        yield leaves
    finally:
        over.append(True)
