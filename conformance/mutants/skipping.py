"""Mutants of Python splits and opaque parts: what is skipped has effects after all, or what crosses is not what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ariadne import PythonSplit
from ariadne.boundary import BoundaryPayload
from ariadne.capture import Example
from ariadne.runtime.variant import Variant
from ariadne.stopped.noted import Before
from ariadne.stopped.python import set_generators
from ariadne.stopped.split import Settings
from conformance.mutants.planted import Planted, wrapped


class _Python(PythonSplit):
    """A Python split whose suffix, run from bytes, has a bug; it stays the same when it is cut elsewhere."""

    def elsewhere(self, settings: Settings) -> PythonSplit:
        made = super().elsewhere(settings)
        made.__class__ = type(self)  # after it was proved
        return made

    def prove_training(self, example: Example) -> None:
        kind, self.__class__ = type(self), PythonSplit  # type: ignore[assignment]
        try:
            PythonSplit.prove_training(self, example)
        finally:
            self.__class__ = kind


class _InPython(Planted):
    """A bug that lies in a Python split of this kind."""

    kind: ClassVar[type[_Python]]

    @classmethod
    def in_python(cls, plain: PythonSplit) -> Any:
        plain.__class__ = cls.kind
        return plain


class _Twice(_Python):
    def _run_rest(self, boundary: BoundaryPayload, grad: bool, values: Sequence[Any] | None = None) -> Any:
        found = super()._run_rest(boundary, grad, values)
        for (path, _, name), was, now in Before.read(boundary.raw[-1]).attributes:
            if was and type(was[0]) is int:
                self.model.get_submodule(path).__dict__[name] += now[0] - was[0]
        return found


class EffectTwice(_InPython):
    """A count that moves before the cut moves again where that part is skipped."""

    piece, kind = "stopped.skipped", _Twice


class _Left(_Python):
    def _run_rest(self, boundary: BoundaryPayload, grad: bool, values: Sequence[Any] | None = None) -> Any:
        found = super()._run_rest(boundary, grad, values)
        set_generators(Before.read(boundary.raw[-1]).generators)
        return found


class GeneratorsNotPutBack(_InPython):
    """Python's generators are left where the skipped part begins, and not where they stood before the suffix."""

    piece, kind = "stopped.python", _Left


class _Draws(_Python):
    def _run_rest(self, boundary: BoundaryPayload, grad: bool, values: Sequence[Any] | None = None) -> Any:
        torch.rand(16)
        return super()._run_rest(boundary, grad, values)


class SkippedDraw(_InPython):
    """An op before the cut runs after all where it is skipped, and draws from torch's generator."""

    piece, kind = "stopped.absent", _Draws


class _Stale(_Python):
    def _run_rest(self, boundary: BoundaryPayload, grad: bool, values: Sequence[Any] | None = None) -> Any:
        crossed = list(boundary.raw if values is None else values)
        last = self.__dict__.get("last")
        self.__dict__["last"] = crossed[0].detach().clone()
        if last is not None and last.shape == crossed[0].shape:
            crossed[0] = crossed[0] + (last - crossed[0]).detach()
        return super()._run_rest(boundary, grad, crossed)


class StaleCrossing(_InPython):
    """What stands for the module's output is that of the boundary before."""

    piece, kind = "stopped.boundary", _Stale


class _Cut(_Python):
    def backward_prefix(
        self, boundary: BoundaryPayload, boundary_grads: Mapping[str, torch.Tensor | None], **options: Any
    ) -> None:
        sent = {label: None if label.startswith("kept_") else g for label, g in boundary_grads.items()}
        super().backward_prefix(boundary, sent, **options)


class KeptWithoutGradient(_InPython):
    """What forward keeps beside the module's output gives no gradient to the prefix."""

    piece, kind = "stopped.crossing", _Cut


class SideTwice(Planted):
    """A side that calls an opaque part runs twice: what the part keeps, and draws, moves twice."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        for side in ("prefix", "suffix"):
            if any(n.target.startswith("python.opaque") for n in variant.parts[side].nodes(variant.plan)):
                wrapped(variant, side, lambda inner, batch, given: (inner(batch, *given), inner(batch, *given))[1])
