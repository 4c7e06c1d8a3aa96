"""The front end of `torch.distributed.pipelining`: two stages, one after the other in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import pipeline

from conformance.targets.base import Captured, Target
from conformance.targets.export import EXPORT_DISCLAIMS


def middle(module: fx.GraphModule) -> fx.GraphModule:
    """A split policy: before the middle one of the calls."""
    nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
    with module.graph.inserting_before(nodes[len(nodes) // 2]):
        module.graph.call_function(torch.ops.pippy._pipe_split.default)
    module.recompile()
    return module


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """The stages train under schedules over processes, which are not asked here."""
    pipe = pipeline(model, tuple(args), dict(kwargs), split_policy=middle)
    stages = fx.GraphModule(pipe.split_gm, pipe.split_gm.graph)
    return Captured(stages, flat=True)  # documented: the last stage gives a tuple of tensors


TARGET = Target(
    name="pipelining",
    title="torch.distributed.pipelining",
    kind="split",
    package="torch",
    source="https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
    capture=capture,
    disclaims={
        **EXPORT_DISCLAIMS,
        "batches": "static shapes: the micro-batch of the example",
        "one": "static shapes: the micro-batch of the example",
        "gradients": "its stages train under a schedule over processes, which is not asked here",
        "state": "buffers belong to its stages",
    },
)
