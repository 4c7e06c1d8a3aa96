"""Mutants of what a loss gives to parameters of the prefix by itself."""

from __future__ import annotations

from typing import Any

import torch

from ariadne.boundary import BoundaryPayload
from conformance.mutants.planted import Planted


class _Planted(Planted):
    def penalised(self, boundary: BoundaryPayload) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What waits for parameters that the suffix's ops don't read, but the loss reaches, as where they are given back."""
        plan, part = self._main.plan, self._main.parts["suffix"]
        values = (plan.values.get(name) for node in part.nodes(plan) for name in node.reads)
        places = [v.origin for v in values if v is not None and v.kind == "parameter"]
        read = {id(self.model.get_submodule(path)._parameters[name]) for path, name in places}
        return [(p, g) for p, g in boundary._shared if id(p) not in read]


class PenaltyLost(_Planted):
    """What the loss alone gives to a parameter of the prefix is lost."""

    piece = "runtime.waiting"

    def backward_prefix(self, boundary: BoundaryPayload, *args: Any, **kwargs: Any) -> None:
        lost = {id(p) for p, _ in self.penalised(boundary)}
        boundary._shared = [(p, g) for p, g in boundary._shared if id(p) not in lost]
        super().backward_prefix(boundary, *args, **kwargs)


class PenaltyTwice(_Planted):
    """What the loss alone gives to a parameter of the prefix is added twice."""

    piece = "runtime.waiting"

    def backward_prefix(self, boundary: BoundaryPayload, *args: Any, **kwargs: Any) -> None:
        boundary._shared = [*boundary._shared, *self.penalised(boundary)]
        super().backward_prefix(boundary, *args, **kwargs)


class PenaltyLast(_Planted):
    """What the loss alone gives to a parameter of the prefix is added after the prefix's own parts, not before them."""

    piece = "runtime.waiting"

    def backward_prefix(self, boundary: BoundaryPayload, *args: Any, **kwargs: Any) -> None:
        late = self.penalised(boundary)
        ids = {id(p) for p, _ in late}
        boundary._shared = [(p, g) for p, g in boundary._shared if id(p) not in ids]
        optimizer = kwargs.pop("optimizer", None)
        if optimizer is not None:
            own = {id(p) for p in self.prefix_parameters()}
            for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in own):
                p.grad = None
        super().backward_prefix(boundary, *args, **kwargs)
        for p, g in late:
            p.grad = g if p.grad is None else p.grad + g
        if optimizer is not None:
            optimizer.step()
