"""What a split is measured against: the model itself, and what torch has for compiling, exporting and splitting it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from benchmarks.subject import EXAMPLE_BATCH, LARGEST_BATCH, NotApplicableError, Step, Subject


def eager(subject: Subject, batch: int) -> Step:
    """`model(x)`."""
    model = subject.model()
    return subject.step(model, list(model.parameters()))


def compiled_model(subject: Subject, batch: int, **options: Any) -> Step:
    """`torch.compile(model)` with these options, the batch marked as nothing: as its users call it."""
    model = subject.model()
    return subject.step(torch.compile(model, **options), list(model.parameters()))


def exported(subject: Subject, batch: int) -> Step:
    """The module of a `torch.export` program with a dynamic batch."""
    args, kwargs = subject.inputs(EXAMPLE_BATCH)
    dim = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)

    def shapes(value: Any) -> Any:
        batched = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == EXAMPLE_BATCH
        return {0: dim} if batched else None

    # A flat forward of the inputs at hand: torch.export wants a spec for every parameter of a signature, `*args` too.
    flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    program = torch.export.export(
        _Flat(subject.model(), spec),
        tuple(flat),
        dynamic_shapes=(tuple(shapes(v) for v in flat),),
        strict=False,
    )
    module = program.module()
    return subject.step(
        lambda *a, **k: module(*torch.utils._pytree.tree_leaves((a, k))),
        list(module.parameters()),
    )


class _Flat(nn.Module):
    """A model with a forward of its inputs' leaves."""

    def __init__(self, model: nn.Module, spec: Any) -> None:
        super().__init__()
        self.model, self.spec = model, spec

    def forward(self, *flat: Any) -> Any:
        args, kwargs = torch.utils._pytree.tree_unflatten(list(flat), self.spec)
        return self.model(*args, **kwargs)


def halves_of_fx(subject: Subject, batch: int) -> Step:
    """`torch.fx.symbolic_trace` and `split_module` at half of the calls."""
    model = subject.model()
    traced = fx.symbolic_trace(model)
    at = _half(traced.graph)
    side = {node: int(i >= at) for i, node in enumerate(traced.graph.nodes)}
    both = split_module(traced, model, lambda node: side[node])
    return subject.step(both, list(both.parameters()))


def _half(graph: fx.Graph) -> int:
    """The position in a graph before which half of its calls stand."""
    calling = [i for i, node in enumerate(graph.nodes) if node.op.startswith("call_")]
    if len(calling) < 2:
        raise NotApplicableError("fewer than two calls, nothing to split")
    return calling[len(calling) // 2]


def pipelined(subject: Subject, batch: int) -> Step:
    """Two stages of `torch.distributed.pipelining`, one after the other in one process; static shapes, so for one batch."""
    if subject.task != "inference":
        raise NotApplicableError("its stages train under a schedule over processes, not in one")
    # Only now, for it imports Dynamo: others would find that imported, and pay nothing for it.
    from torch.distributed.pipelining import pipeline  # noqa: PLC0415

    args, kwargs = subject.inputs(batch)

    def split(module: fx.GraphModule) -> fx.GraphModule:
        nodes = list(module.graph.nodes)
        with module.graph.inserting_before(nodes[_half(module.graph)]):
            module.graph.call_function(torch.ops.pippy._pipe_split.default)
        module.recompile()
        return module

    pipe = pipeline(subject.model(), args, kwargs, split_policy=split)
    stages = fx.GraphModule(pipe.split_gm, pipe.split_gm.graph)  # Pipe itself runs the two calls in an interpreter
    return subject.step(stages, list(stages.parameters()))
