"""Mutants of opaque parts: what `ariadne.opaque` takes as it is, is called otherwise than the model calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ariadne.capture import Call
from ariadne.plan import TracePlan
from conformance.mutants.planted import Planted, on_tensors

Function = Callable[..., Any]


def _called(plan: TracePlan, by: Callable[[Function], Function]) -> TracePlan:
    """The plan with other functions in the place of its opaque parts."""
    objects = {n: replace(o, function=by(o.function)) if type(o) is Call else o for n, o in plan.objects.items()}
    return replace(plan, objects=objects)


class PartCalledTwice(Planted):
    """A part is called twice, and what it counts, draws and writes comes twice."""

    piece = "capture.call"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return _called(
            plan, lambda function: lambda *args, **kwargs: (function(*args, **kwargs), function(*args, **kwargs))[1]
        )


class StalePart(Planted):
    """What a part gave at its first call is given again at each."""

    piece = "capture.call"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def stale(function: Function) -> Function:
            kept = list[torch.Tensor]()

            def call(*args: Any, **kwargs: Any) -> Any:
                out: torch.Tensor = function(*args, **kwargs)
                kept.append(out.detach())
                return out + (kept[0] - out.detach())  # with the graph of this call

            return call

        return _called(plan, stale)


class DetachedPart(Planted):
    """A part runs, and no gradients go back through it."""

    piece = "capture.call"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def detached(function: Function) -> Function:
            return lambda *args, **kwargs: on_tensors(torch.detach, function(*args, **kwargs))

        return _called(plan, detached)
