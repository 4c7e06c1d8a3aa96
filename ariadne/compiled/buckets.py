"""Buckets: a batch is padded to the next of a few sizes before a compiled kernel runs, and its results are cut back.

CUDA graphs are recorded once for each size. With buckets there are as many as buckets, and not one for each batch that comes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ariadne.compiled.lift import Lifted
from ariadne.compiled.rows import Along, Mixed, rows
from ariadne.plan import TraceNode, TracePlan

Kernel = Callable[..., tuple[Any, ...] | None]


class Bucketed:
    """A kernel that sees only batches of the sizes in `buckets`, or larger ones as they are.

    What it is padded with is copies of the last sample, so that all that is computed is what a sample gives. Training works: what
    is cut off sends back gradients of zero.
    """

    def __init__(self, run: Kernel, buckets: tuple[int, ...], inputs: Sequence[Along | None],
                 results: Sequence[Along | None]) -> None:  # fmt: skip
        self.run, self.buckets = run, buckets
        self.inputs = [(i, along) for i, along in enumerate(inputs) if along is not None]
        self.results = tuple(results)

    @classmethod
    def of(
        cls, run: Kernel, lifted: Lifted, plan: TracePlan, nodes: Sequence[TraceNode], buckets: tuple[int, ...]
    ) -> Bucketed:
        """The kernel of a segment that consists of `nodes`; `Mixed` where its samples may depend on each other."""
        served = tuple(b for b in buckets if b in plan.batches)
        if not served:
            raise Mixed(f"none of {', '.join(map(str, buckets))} is a batch that the plan serves ({plan.batches})")
        if lifted.has_witness or any(node.is_witness for node in nodes):
            raise Mixed("it reads numbers out of tensors")
        found = rows(plan, nodes, lifted.inputs)
        return cls(run, served, [found[n] for n in lifted.inputs], [found[n] for n in lifted.results])

    def __call__(self, batch: int, *args: Any) -> tuple[Any, ...] | None:
        """Run the kernel for `batch` samples."""
        at = bisect_left(self.buckets, batch)
        if at == len(self.buckets) or self.buckets[at] == batch or not batch:  # of no sample there is no last one
            return self.run(*args)
        given, more = list(args), self.buckets[at] - batch
        for i, along in self.inputs:
            given[i] = _grown(given[i], along, more)
        found = self.run(*given)
        if found is None:
            return None
        return tuple(
            t if along is None else _cut(t, along, batch) for t, along in zip(found, self.results, strict=True)
        )


def _grown(t: torch.Tensor, along: Along, more: int) -> torch.Tensor:
    """The tensor with its last sample repeated."""
    last = t.narrow(along.dim, t.shape[along.dim] - along.each, along.each)
    return torch.cat([t, *[last] * more], along.dim)


def _cut(t: torch.Tensor, along: Along, batch: int) -> torch.Tensor:
    """The samples at the start, in memory of their own: what follows them would go with them wherever they are sent."""
    return t.narrow(along.dim, 0, batch * along.each).clone(memory_format=torch.preserve_format)
