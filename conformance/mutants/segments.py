"""Mutants of code generation, of segments and of the frontier: how the two halves run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ariadne.codegen import Source, emit
from ariadne.plan import Ref, TracePlan
from ariadne.runtime import Variant
from ariadne.strided import own
from ariadne.verify import Interpreter
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

    piece = "frontier"

    def in_variant(self, variant: Variant) -> None:
        pair = _twins(variant)

        def swapped(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            values = list(given)
            if pair:
                i, j = pair
                values[i], values[j] = values[j], values[i]
            return suffix(batch, *values)

        wrapped(variant, "suffix", swapped)


class LostOp(Planted):
    """The first op after the cut runs in neither half; only the debug interpreter still runs it."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        plan = _without_first_op(variant.plan, variant.candidate.cut)
        self.recode(variant, "suffix", emit(plan, variant.candidate, "suffix", self.model))


class StaleParameters(Planted):
    """The prefix reads copies of parameters that were made when the split was prepared."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        def stale(table: dict[str, Any]) -> dict[str, Any]:
            return {
                k: None if p is None else p.detach().clone().requires_grad_(p.requires_grad) for k, p in table.items()
            }

        self.recode(variant, "prefix", _renamed(variant.prefix_source, stale, ("p_",)))


class KeptParameters(Planted):
    """Parameters are looked up when the split is prepared: one put in another's place is not seen."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        for side in ("prefix", "suffix"):
            self.recode(variant, side, _renamed(getattr(variant, f"{side}_source"), dict, ("p_",)))


class StaleBuffers(Planted):
    """Buffers are copied when the split is prepared: what a step moves stays in the copy."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        def stale(table: dict[str, Any]) -> dict[str, Any]:
            return {k: None if b is None else b.clone() for k, b in table.items()}

        for side in ("prefix", "suffix"):
            self.recode(variant, side, _renamed(getattr(variant, f"{side}_source"), stale, ("b_",)))


class WrittenPayload(Planted):
    """The suffix writes in place into the boundary's own tensors, which it should have copied."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        candidate = replace(variant.candidate, written=())
        self.recode(variant, "suffix", emit(variant.plan, candidate, "suffix", self.model))
        if isinstance(variant.suffix, Interpreter):
            variant.suffix = Interpreter(variant.plan, candidate, "suffix", self.model)


class CopiedBoundary(Planted):
    """Every tensor is copied as it crosses: what shared memory, with an input or an output, no longer does."""

    piece = "boundary"

    def in_variant(self, variant: Variant) -> None:
        wrapped(variant, "prefix", lambda prefix, batch, given: on_tensors(own, prefix(batch, *given)))


class ReusedMemory(Planted):
    """Without gradients, a prefix writes its results where it wrote those of the call before, as a CUDA graph would."""

    piece = "runtime"

    def in_variant(self, variant: Variant) -> None:
        kept: dict[tuple[Any, ...], torch.Tensor] = {}

        def reusing(prefix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            found = prefix(batch, *given)
            if torch.is_grad_enabled():
                return found
            places = iter(range(len(variant.candidate.live) * 64))

            def place(t: torch.Tensor) -> torch.Tensor:
                key = (next(places), t.shape, t.stride(), t.dtype)
                if key not in kept:
                    kept[key] = own(t)
                    return kept[key]
                return kept[key].copy_(t)

            return on_tensors(place, found)

        wrapped(variant, "prefix", reusing)


class RememberedAnswer(Planted):
    """Without gradients, a suffix answers with what it found for the first boundary of that batch."""

    piece = "runtime"

    def in_variant(self, variant: Variant) -> None:
        kept: dict[int, Any] = {}

        def remembering(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            if torch.is_grad_enabled():
                return suffix(batch, *given)
            if batch not in kept:
                kept[batch] = on_tensors(own, suffix(batch, *given))
            return on_tensors(own, kept[batch])

        wrapped(variant, "suffix", remembering)


class WrittenInput(Planted):
    """The prefix leaves its first floating input changed."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        def writing(prefix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            mine = [own(t.detach()).requires_grad_(t.requires_grad) if _floats(t) else t for t in given]
            found = prefix(batch, *mine)
            for t in given:
                if _floats(t):
                    t.data.mul_(2)
                    break
            return found

        wrapped(variant, "prefix", writing)


class OtherStrides(Planted):
    """Outputs of two dims or more have the right numbers in another order of memory."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        def turned(t: torch.Tensor) -> torch.Tensor:
            return t.mT.contiguous().mT if t.dim() > 1 else t

        wrapped(variant, "suffix", lambda suffix, batch, given: on_tensors(turned, suffix(batch, *given)))


class OtherDtype(Planted):
    """Floating outputs come in double precision."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        def wide(t: torch.Tensor) -> torch.Tensor:
            return t.double() if t.is_floating_point() else t

        wrapped(variant, "suffix", lambda suffix, batch, given: on_tensors(wide, suffix(batch, *given)))


class KeptGraph(Planted):
    """Replay leaves gradients on: its outputs require grad, and hold a graph."""

    piece = "runtime"

    def in_variant(self, variant: Variant) -> None:
        def recording(segment: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            with torch.enable_grad():
                return segment(batch, *given)

        wrapped(variant, "suffix", recording)


class AutocastIgnored(Planted):
    """The suffix runs outside of the caller's autocast."""

    piece = "runtime"

    def in_variant(self, variant: Variant) -> None:
        def outside(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            wide = [t.float() if isinstance(t, torch.Tensor) and t.dtype is torch.bfloat16 else t for t in given]
            if not torch.is_autocast_enabled("cpu"):
                return suffix(batch, *given)
            with torch.autocast("cpu", enabled=False):
                return suffix(batch, *wide)

        wrapped(variant, "suffix", outside)


class OneDrawMore(Planted):
    """The suffix draws one number more than the model, and uses it for nothing."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        def drawing(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            found = suffix(batch, *given)
            torch.rand(())
            return found

        wrapped(variant, "suffix", drawing)


class PythonDraws(Planted):
    """The prefix draws a number from Python's `random`."""

    piece = "runtime"

    def in_variant(self, variant: Variant) -> None:
        def drawing(prefix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            random.random()
            return prefix(batch, *given)

        wrapped(variant, "prefix", drawing)


class NumpyDraws(Planted):
    """The prefix draws a number from numpy's global generator."""

    piece = "runtime"

    def in_variant(self, variant: Variant) -> None:
        def drawing(prefix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            np.random.random()
            return prefix(batch, *given)

        wrapped(variant, "prefix", drawing)


class CompiledInHalf(Planted):
    """Compiled segments round what they return to half precision."""

    piece = "segment"

    def in_variant(self, variant: Variant) -> None:
        def rounded(t: torch.Tensor) -> torch.Tensor:
            return t.bfloat16().to(t.dtype) if t.is_floating_point() else t

        if self.settings.mode == "compiled":
            wrapped(variant, "suffix", lambda suffix, batch, given: on_tensors(rounded, suffix(batch, *given)))


class InterpreterWithoutGraph(Planted):
    """The debug interpreter's prefix keeps no graph, and so no gradient walks back through it."""

    piece = "verify"

    def in_variant(self, variant: Variant) -> None:
        def detached(t: torch.Tensor) -> torch.Tensor:
            return t.detach().requires_grad_(t.requires_grad)

        if isinstance(variant.prefix, Interpreter):
            wrapped(variant, "prefix", lambda prefix, batch, given: on_tensors(detached, prefix(batch, *given)))


class MixedRows(Planted):
    """The suffix gives each row of the batch the answer of the next."""

    piece = "codegen"

    def in_variant(self, variant: Variant) -> None:
        def rolled(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            def roll(t: torch.Tensor) -> torch.Tensor:
                return t.roll(1, 0) if t.dim() and t.shape[0] == batch else t

            return on_tensors(roll, suffix(batch, *given))

        wrapped(variant, "suffix", rolled)


def _floats(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()
