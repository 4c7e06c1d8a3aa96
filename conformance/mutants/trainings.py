"""Mutants of training across the cut: gradients, optimizers, the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ariadne.boundary import BoundaryPayload
from ariadne.plan import TracePlan
from ariadne.runtime.taps import Gradients
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted, on_tensors

Trained = tuple[torch.Tensor, Gradients]


class DetachedCut(Planted):
    """No boundary tensor asks for a gradient, and so none reaches the prefix."""

    piece = "runtime.training"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        boundary.requires_grad = ()
        return boundary


class HiddenParameters(Planted):
    """Parameters that a function reads inside are told as those that no part reads, and the suffix's optimizer steps them."""

    piece = "capture.applied"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return replace(plan, nodes=tuple(replace(node, within=()) for node in plan.nodes))


class ZeroForNone(Planted):
    """A parameter that no gradient reached holds zeros after the backward pass, for which an optimizer would step it."""

    piece = "runtime.training"

    def backward_prefix(self, *args: Any, **kwargs: Any) -> None:
        super().backward_prefix(*args, **kwargs)
        for p in self.model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


class ForgottenGradients(Planted):
    """Gradients that were there before are thrown away without an optimizer that asked for it."""

    piece = "runtime.training"

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        for p in self.model.parameters():
            p.grad = None
        return super().run_training_prefix(*args, **kwargs)


class CompiledLossDoubled(Planted):
    """Compiled training reports twice its loss; all that it does with it is right."""

    piece = "compiled.jit"

    def train_suffix(self, *args: Any, **kwargs: Any) -> Trained:
        loss, gradients = super().train_suffix(*args, **kwargs)
        return (loss * 2 if self.settings.mode == "compiled" else loss), gradients


class CompiledDraws(Planted):
    """Compiled training draws a random number more than the whole model does."""

    piece = "compiled.jit"

    def train_suffix(self, *args: Any, **kwargs: Any) -> Trained:
        if self.settings.mode == "compiled":
            torch.rand(1)
        return super().train_suffix(*args, **kwargs)


class SteppedTwice(Planted):
    """The optimizer of the suffix steps twice."""

    piece = "runtime.training"

    def train_suffix(self, *args: Any, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> Trained:
        found = super().train_suffix(*args, optimizer=optimizer, **kwargs)
        if optimizer is not None:
            optimizer.step()
        return found


class ForgottenMomentum(Planted):
    """What the suffix's optimizer remembers is lost after every step."""

    piece = "runtime.training"

    def train_suffix(self, *args: Any, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> Trained:
        found = super().train_suffix(*args, optimizer=optimizer, **kwargs)
        if optimizer is not None:
            optimizer.state.clear()
        return found


class ScaledLoss(Planted):
    """The backward pass starts from half of the loss, while the loss that is returned is right."""

    piece = "runtime.training"

    def train_suffix(self, *args: Any, loss_fn: Callable[[Any, Any], torch.Tensor], **kwargs: Any) -> Trained:
        loss, gradients = super().train_suffix(*args, loss_fn=lambda *given: loss_fn(*given) / 2, **kwargs)
        return loss * 2, gradients


class WrongLoss(Planted):
    """Gradients are right, while the loss that is returned is rounded to half precision."""

    piece = "runtime.training"

    def train_suffix(self, *args: Any, **kwargs: Any) -> Trained:
        loss, gradients = super().train_suffix(*args, **kwargs)
        return loss.bfloat16().to(loss.dtype), gradients


class RoundedGradients(Planted):
    """Boundary gradients are rounded to half precision on their way back."""

    piece = "runtime.training"

    def train_suffix(self, *args: Any, **kwargs: Any) -> Trained:
        loss, gradients = super().train_suffix(*args, **kwargs)
        return loss, on_tensors(lambda g: g.bfloat16().to(g.dtype), gradients)


class SwappedGradients(Planted):
    """Two boundary gradients of one shape come back under each other's label."""

    piece = "runtime.training"

    def train_suffix(self, *args: Any, **kwargs: Any) -> Trained:
        loss, gradients = super().train_suffix(*args, **kwargs)
        first: dict[torch.Size, str] = {}
        for label, g in gradients.items():
            if g is not None and first.setdefault(g.shape, label) != label:
                other = first[g.shape]
                gradients[label], gradients[other] = gradients[other], g
                break
        return loss, gradients


class StaleSides(Planted):
    """Which parameters the sides own is laid out once: one put in another's place is told as one that no part reads."""

    piece = "runtime.variant"

    def in_variant(self, variant: Variant) -> None:
        then: Any = variant.owned()
        variant.owned = lambda: then  # type: ignore[method-assign]


class SharedGradientTwice(Planted):
    """The suffix's part in the gradient of a parameter that both halves read is added twice."""

    piece = "runtime.training"

    def backward_prefix(self, boundary: BoundaryPayload, *args: Any, **kwargs: Any) -> None:
        boundary._shared = [(p, g + g) for p, g in boundary._shared]
        super().backward_prefix(boundary, *args, **kwargs)


class SharedGradientLost(Planted):
    """The suffix's part in the gradient of a parameter that both halves read is lost."""

    piece = "runtime.training"

    def backward_prefix(self, boundary: BoundaryPayload, *args: Any, **kwargs: Any) -> None:
        boundary._shared = []
        super().backward_prefix(boundary, *args, **kwargs)


class LostInputGradient(Planted):
    """Inputs are detached as they enter, and get no gradient."""

    piece = "runtime.split"

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        args, kwargs = on_tensors(lambda t: t.detach(), (args, kwargs))
        return super().run_training_prefix(*args, **kwargs)


class UnwalkedPrefix(Planted):
    """Every second time, the prefix's graph is left alone: its parameters keep the gradients of the step before."""

    piece = "runtime.training"

    def backward_prefix(self, boundary: BoundaryPayload, boundary_grads: Mapping[str, Any], **kwargs: Any) -> None:
        self.walked = not getattr(self, "walked", False)
        if self.walked:
            super().backward_prefix(boundary, boundary_grads, **kwargs)
        else:
            super().backward_prefix(boundary, {}, **kwargs)


class CastBackTwice(Planted):
    """What the suffix has for a weight that autocast cast for both sides is cast back by itself, then added."""

    piece = "runtime.casts"

    def backward_prefix(self, boundary: BoundaryPayload, *args: Any, **kwargs: Any) -> None:
        boundary._shared = [
            (w.node.next_functions[0][0].variable, g.float()) if isinstance(w, GradientEdge) else (w, g)
            for w, g in boundary._shared
        ]
        super().backward_prefix(boundary, *args, **kwargs)


class _Sparse(Planted):
    """What a walk back gives to a sparse parameter of the prefix is another than it was."""

    def backward_prefix(self, boundary: BoundaryPayload, *args: Any, **kwargs: Any) -> None:
        super().backward_prefix(boundary, *args, **kwargs)
        for p in self.model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = self.instead(p.grad)

    def instead(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient that a parameter holds for the one that arrived."""
        raise NotImplementedError


class DenseForSparse(_Sparse):
    """A sparse gradient is made dense on its way to its parameter."""

    piece = "runtime.training"

    def instead(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_dense()


class SparseLost(_Sparse):
    """A sparse gradient does not come to its parameter."""

    piece = "runtime.training"

    def instead(self, gradient: torch.Tensor) -> None:
        return None


class SparseTwice(_Sparse):
    """A sparse gradient is added twice."""

    piece = "runtime.training"

    def instead(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient


class RowsAddedUp(_Sparse):
    """The rows that a sparse gradient has for one token are added up at once."""

    piece = "runtime.training"

    def instead(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.coalesce()


class RowsOnce(_Sparse):
    """Of the rows that a sparse gradient has for one token, the last one stands for all."""

    piece = "runtime.training"

    def instead(self, gradient: torch.Tensor) -> torch.Tensor:
        rows, values = gradient._indices()[0].tolist(), gradient._values()
        last = sorted({row: at for at, row in enumerate(rows)}.values())
        return torch.sparse_coo_tensor(gradient._indices()[:, last], values[last], gradient.shape, is_coalesced=False)
