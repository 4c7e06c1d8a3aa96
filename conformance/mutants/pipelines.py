"""Mutants of pipelines: what one part hands to the next, or back, is not what it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ariadne import Pipeline
from ariadne.boundary import BoundaryPayload
from ariadne.pipeline.flight import Flight, back
from conformance.mutants.planted import Planted


class _InPipeline(Planted):
    """A pipeline that is prepared right, and then changed by `in_pipeline`."""

    piece = "pipeline"

    @classmethod
    def prepare_pipeline(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> Pipeline:
        found = super().prepare_pipeline(model, example_inputs, **options)
        cls.in_pipeline(found)
        return found

    @classmethod
    def in_pipeline(cls, pipeline: Any) -> None:
        """Change a pipeline in its place."""


class SharesTwice(_InPipeline):
    """What later parts have for a tied parameter is added twice."""

    @classmethod
    def in_pipeline(cls, pipeline: Any) -> None:
        def backward(flights: Sequence[Flight], loss: torch.Tensor) -> None:
            gradients: Any = {}
            shares: Any = {}
            for part, flight in zip(reversed(pipeline.parts), reversed(flights), strict=True):
                doubled = {name: 2 * share for name, share in shares.items()}
                gradients, shares = back(
                    flight, loss, gradients, doubled, part.tied, part.owned, list(part.parameters()), part.foreign()
                )

        pipeline.backward = backward


class StaleHop(_InPipeline):
    """The last part gets a value of the first batch for that of this one."""

    @classmethod
    def in_pipeline(cls, pipeline: Any) -> None:
        last, kept = pipeline.parts[-1], dict[tuple[int, ...], Any]()
        fly = last.fly

        def stale(args: Any, kwargs: Any, trains: bool) -> Flight:
            (boundary,) = args
            if not trains:
                raw = list(boundary.raw)
                at = next(i for i, v in enumerate(raw) if isinstance(v, torch.Tensor) and v.is_floating_point())
                raw[at] = kept.setdefault(tuple(raw[at].shape[1:]), raw[at])[:1].expand_as(raw[at]).contiguous()
                boundary = BoundaryPayload(
                    boundary.split_id, boundary.plan_signature, boundary.batch, boundary.labels, tuple(raw)
                )
            found: Flight = fly((boundary,), kwargs, trains)
            return found

        last.__dict__["fly"] = stale


class DrawsOfItsOwn(_InPipeline):
    """A later part draws, and puts the generator back where it was."""

    @classmethod
    def in_pipeline(cls, pipeline: Any) -> None:
        for part in pipeline.parts[1:]:
            fly = part.fly

            def apart(args: Any, kwargs: Any, trains: bool, fly: Any = fly) -> Flight:
                with torch.random.fork_rng():
                    found: Flight = fly(args, kwargs, trains)
                return found

            part.__dict__["fly"] = apart
