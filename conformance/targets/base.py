"""What the scoreboard asks of a system: to capture a model, and to say what its documentation promises.

A target is one file below 100 lines with a `TARGET`. It imports its package at the top: where that is missing, the file cannot be
imported, and the target is said to be missing. Nothing else may tell one target from another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Loss = Callable[[Any], torch.Tensor]
LARGEST = 16  # the largest batch that a captured model is called with
KINDS = ("split", "capture", "prefix")


@dataclass(frozen=True)
class Captured:
    """What a system made of a model.

    `call` is called as the model is. `owner` holds the parameters and buffers that the calls use, under the model's own names;
    None: the model itself. `flat`: `call` gives the tensors of the output in a row, without their containers. `step` is a
    training step by the system's own interface, up to the gradients; without it, it is the loss of `call`, walked back.
    `graphs` says how many graphs there are now.
    """

    call: Callable[..., Any]
    owner: nn.Module | None = None
    flat: bool = False
    step: Callable[[Loss, Sequence[Any], Mapping[str, Any]], None] | None = None
    graphs: Callable[[], int] = lambda: 1

    def train(self, loss: Loss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """One training step, up to the gradients."""
        if self.step is not None:
            self.step(loss, args, kwargs)
        else:
            loss(self.call(*args, **kwargs)).backward()


@dataclass(frozen=True)
class Target:
    """A system: how it captures, and what its documentation does not promise.

    `capture(model, args, kwargs)` is how the documentation says to do it, for any batch where the system knows such. `kind`:
    "split" (in two parts, which `call` runs one after the other), "prefix" (the first part only; `call` runs the model's own rest)
    or "capture" (whole). `package`: the distribution. `source`: where its documentation says what is promised.
    `disclaims`: the keys of questions and of difficulties that are not promised ("state", "nested", or only both together:
    "state/nested"), each with the reason; what is named here is asked and shown, and never counted.
    `tolerance`: outputs may be off by this share of the largest, 0 means bit for bit.
    """

    name: str
    title: str
    kind: str
    package: str
    source: str
    capture: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Captured]
    disclaims: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: kind must be one of {', '.join(KINDS)}; found {self.kind!r}")


# What no documentation promises of a graph that is captured once: to follow the module that it was captured from.
SNAPSHOT: Mapping[str, str] = {
    "flag": "captured in one mode, and not said to follow a change of it",
    "loaded": "a snapshot, not said to follow the model's weights",
    "replaced": "a snapshot, not said to follow the model's parameters",
    "hook": "a snapshot, not said to follow hooks that are added later",
}
# A trace by one example: what Python decides is decided at capture, and every such documentation says so.
TRACED: Mapping[str, str] = {
    "branch-on-data": "a trace holds the path of the example",
    "branch-on-batch": "a trace holds the path of the example",
    "branch-on-mode": "a trace holds the path of the example",
    "branch-on-capture": "documented: who asks is told that it is being captured",
    "python-random": "a number that Python draws is a constant of the trace",
    "python-state": "what Python changes is not in the graph",
}


def batched(value: Any, batch: int, dim: Any) -> Any:
    """A spec of shapes for `torch.export` and what follows it: dim 0 of every tensor that has as many rows as the batch."""
    return torch.utils._pytree.tree_map(
        lambda v: ({0: dim} if v.dim() and v.shape[0] == batch else {}) if isinstance(v, torch.Tensor) else None, value
    )


def rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The batch: dim 0 of the first tensor."""
    leaves = torch.utils._pytree.tree_leaves((tuple(args), dict(kwargs)))
    return int(next(v.shape[0] for v in leaves if isinstance(v, torch.Tensor) and v.dim()))
