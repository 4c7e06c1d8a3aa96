"""Mutants of code generation, of segments and of the frontier: what the two halves compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ariadne.cut import SIDES, SplitCandidate, parts
from ariadne.plan import Ref, TracePlan
from ariadne.runtime.variant import Variant
from ariadne.segment import Interpreter, Source, emit
from conformance.mutants.planted import Planted, Segment, on_tensors, wrapped


def _twins(variant: Variant) -> list[int]:
    """The places of two boundary values of one type; empty where there are none."""
    first: dict[Any, int] = {}
    for i, name in enumerate(variant.candidate.live):
        value = variant.plan.values[name]
        if value.dtype is not None and first.setdefault((value.shape, value.dtype), i) != i:
            return [first[value.shape, value.dtype], i]
    return []


def _without_first_op(plan: TracePlan, cut: int) -> TracePlan:
    """The plan with the op after the cut as one that passes its input on, where that fits."""
    node = plan.nodes[cut]
    fits = (
        len(node.outputs) == 1
        and bool(node.args)
        and isinstance(node.args[0], Ref)
        and not node.writes
        and plan.values[node.args[0].name].describe() == plan.values[node.outputs[0]].describe()
    )
    if not fits:
        return plan
    lost = replace(node, target="aten.alias.default", args=node.args[:1], kwargs=(), seeded=False)
    return replace(plan, nodes=(*plan.nodes[:cut], lost, *plan.nodes[cut + 1 :]))


def _renamed(source: Source, table: Callable[[dict[str, Any]], dict[str, Any]], kinds: tuple[str, ...]) -> Source:
    """The source with other tables in the place of the model's own."""
    found = {name: thing for name, thing in source.namespace.items() if name[:2] in kinds and type(thing) is dict}
    return replace(source, namespace={**source.namespace, **{name: table(thing) for name, thing in found.items()}})


class SwappedFrontier(Planted):
    """The suffix takes two boundary tensors of one type in each other's place."""

    piece = "cut.frontier"

    def in_variant(self, variant: Variant) -> None:
        pair = _twins(variant)

        def swapped(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            values = list(given)
            if pair:
                i, j = pair
                values[i], values[j] = values[j], values[i]
            return suffix(batch, *values)

        wrapped(variant, "suffix", swapped)


class EveryCutSafe(Planted):
    """Cuts across which shared memory is written are offered as safe; what crosses is copied, each tensor by itself."""

    piece = "cut.frontier"

    @classmethod
    def in_candidates(cls, candidates: tuple[SplitCandidate, ...]) -> tuple[SplitCandidate, ...]:
        return tuple(replace(c, reason="") if c.live else c for c in candidates)


class EveryCutTrained(Planted):
    """Training is not refused where gradients are added up in another order than in the whole model."""

    piece = "cut.frontier"

    @classmethod
    def in_candidates(cls, candidates: tuple[SplitCandidate, ...]) -> tuple[SplitCandidate, ...]:
        return tuple(replace(c, inexact="") for c in candidates)


class LostOp(Planted):
    """The first op after the cut runs in neither half; only the debug interpreter still runs it."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        plan = _without_first_op(variant.plan, variant.candidate.cut)
        self.recode(variant, "suffix", emit(plan, parts(plan, (variant.candidate,), SIDES)[1], self.model))


class _Then(torch.autograd.Function):
    """A tensor's numbers as they were, with its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
        return then.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Stale(dict[str, Any]):
    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__(table)
        self.then = {key: None if p is None else p.detach().clone() for key, p in table.items()}

    def __getitem__(self, key: str) -> Any:
        now = super().__getitem__(key)
        return None if now is None else _Then.apply(now, self.then[key])


class StaleParameters(Planted):
    """The prefix reads the numbers that parameters had when the split was prepared; their gradients are right."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        self.recode(variant, "prefix", _renamed(variant.prefix_source, _Stale, ("p_",)))


class KeptParameters(Planted):
    """Parameters are looked up when the split is prepared: one put in another's place is not seen."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        for side in ("prefix", "suffix"):
            self.recode(variant, side, _renamed(getattr(variant, f"{side}_source"), dict, ("p_",)))


class StaleBuffers(Planted):
    """Buffers are copied when the split is prepared: what a step moves stays in the copy."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        def stale(table: dict[str, Any]) -> dict[str, Any]:
            return {k: None if b is None else b.clone() for k, b in table.items()}

        for side in ("prefix", "suffix"):
            self.recode(variant, side, _renamed(getattr(variant, f"{side}_source"), stale, ("b_",)))


class WrittenPayload(Planted):
    """The suffix writes in place into the boundary's own tensors, which it should have copied."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        candidate = replace(variant.candidate, written=())
        part = parts(variant.plan, (candidate,), SIDES)[1]
        self.recode(variant, "suffix", emit(variant.plan, part, self.model))
        if isinstance(variant.suffix, Interpreter):
            variant.suffix = Interpreter(variant.plan, part, self.model)


class OtherStrides(Planted):
    """Outputs of two dims or more have the right numbers in another order of memory."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        def turned(t: torch.Tensor) -> torch.Tensor:
            return t.mT.contiguous().mT if t.dim() > 1 else t

        wrapped(variant, "suffix", lambda suffix, batch, given: on_tensors(turned, suffix(batch, *given)))


class OtherDtype(Planted):
    """Floating outputs come in double precision."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        def wide(t: torch.Tensor) -> torch.Tensor:
            return t.double() if t.is_floating_point() else t

        wrapped(variant, "suffix", lambda suffix, batch, given: on_tensors(wide, suffix(batch, *given)))


class InterpreterWithoutGraph(Planted):
    """The debug interpreter's prefix keeps no graph, and so no gradient walks back through it."""

    piece = "segment.interpreter"

    def in_variant(self, variant: Variant) -> None:
        def detached(t: torch.Tensor) -> torch.Tensor:
            return t.detach().requires_grad_(t.requires_grad)

        if isinstance(variant.prefix, Interpreter):
            wrapped(variant, "prefix", lambda prefix, batch, given: on_tensors(detached, prefix(batch, *given)))


class MixedRows(Planted):
    """The suffix gives each row of the batch the answer of the next."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        def rolled(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            def roll(t: torch.Tensor) -> torch.Tensor:
                return t.roll(1, 0) if t.dim() and t.shape[0] == batch else t

            return on_tensors(roll, suffix(batch, *given))

        wrapped(variant, "suffix", rolled)
