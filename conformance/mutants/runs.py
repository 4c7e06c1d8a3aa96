"""Mutants of how the two halves run: memory, modes of torch, random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ariadne.plan import own
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted, Segment, on_tensors, wrapped


class CopiedBoundary(Planted):
    """Every tensor is copied as it crosses: what shared memory, with an input or an output, no longer does."""

    piece = "boundary.payload"

    def in_variant(self, variant: Variant) -> None:
        wrapped(variant, "prefix", lambda prefix, batch, given: on_tensors(own, prefix(batch, *given)))


class ReusedMemory(Planted):
    """Without gradients, a prefix writes its results where it wrote those of the call before, as a CUDA graph would."""

    piece = "runtime.split"

    def in_variant(self, variant: Variant) -> None:
        kept: dict[tuple[Any, ...], torch.Tensor] = {}

        def reusing(prefix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            found = prefix(batch, *given)
            if torch.is_grad_enabled():
                return found
            places = iter(range(1 << 16))

            def place(t: torch.Tensor) -> torch.Tensor:
                key = (next(places), t.shape, t.stride(), t.dtype)
                return kept[key].copy_(t) if key in kept else kept.setdefault(key, own(t))

            return on_tensors(place, found)

        wrapped(variant, "prefix", reusing)


class ReusedOutput(Planted):
    """Without gradients, a suffix gives its results in the memory of those that it gave before."""

    piece = "runtime.split"

    def in_variant(self, variant: Variant) -> None:
        kept: dict[tuple[Any, ...], torch.Tensor] = {}

        def reusing(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            places = iter(range(1 << 16))

            def place(t: torch.Tensor) -> torch.Tensor:
                key = (next(places), t.shape, t.stride(), t.dtype)
                return kept[key].copy_(t) if key in kept else kept.setdefault(key, t)

            found = suffix(batch, *given)
            return found if torch.is_grad_enabled() else on_tensors(place, found)

        wrapped(variant, "suffix", reusing)


class RememberedAnswer(Planted):
    """Without gradients, a suffix answers with what it found for the first boundary of that batch."""

    piece = "runtime.split"

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

    piece = "segment.codegen"

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


class KeptGraph(Planted):
    """Replay leaves gradients on: its outputs require grad, and hold a graph."""

    piece = "runtime.split"

    def in_variant(self, variant: Variant) -> None:
        def recording(segment: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            with torch.enable_grad():
                return segment(batch, *given)

        wrapped(variant, "suffix", recording)


class AutocastIgnored(Planted):
    """The suffix runs outside of the caller's autocast."""

    piece = "runtime.split"

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

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        def drawing(suffix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            found = suffix(batch, *given)
            torch.rand(())
            return found

        wrapped(variant, "suffix", drawing)


class PythonDraws(Planted):
    """The prefix draws a number from Python's `random`."""

    piece = "runtime.split"

    def in_variant(self, variant: Variant) -> None:
        def drawing(prefix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            random.random()
            return prefix(batch, *given)

        wrapped(variant, "prefix", drawing)


class NumpyDraws(Planted):
    """The prefix draws a number from numpy's global generator."""

    piece = "runtime.split"

    def in_variant(self, variant: Variant) -> None:
        def drawing(prefix: Segment, batch: int, given: tuple[Any, ...]) -> Any:
            np.random.random()
            return prefix(batch, *given)

        wrapped(variant, "prefix", drawing)


class CompiledInHalf(Planted):
    """Compiled segments round what they return to half precision."""

    piece = "segment.functions"

    def in_variant(self, variant: Variant) -> None:
        def rounded(t: torch.Tensor) -> torch.Tensor:
            return t.bfloat16().to(t.dtype) if t.is_floating_point() else t

        if self.settings.mode == "compiled":
            wrapped(variant, "suffix", lambda suffix, batch, given: on_tensors(rounded, suffix(batch, *given)))


def _floats(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()
