"""Mutants of how far a plan reaches: for which batches it is said to hold."""

from __future__ import annotations

from dataclasses import replace

from ariadne.plan import Batches, TracePlan
from conformance.mutants.planted import Planted


class UnseenRead(Planted):
    """A read of the batch's number in a real run is not seen: its plan serves batches that never ran."""

    piece = "capture.followed"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        if plan.captured_by != "observed":
            return plan
        return replace(plan, batches=Batches(((plan.batches.ranges[0][0], 64),)), excluded=())


class UnseenText(Planted):
    """Text of a size is not seen: a plan serves the batches around those that it was shown to hold for."""

    piece = "capture.disguise"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        ranges = plan.batches.ranges
        return replace(plan, batches=Batches(((ranges[0][0], max(8, ranges[-1][1])),)))


class UnseenLayout(Planted):
    """Forward's question how an input lies in memory is not seen: a plan serves inputs that lie otherwise."""

    piece = "guards.calls"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return replace(plan, assumption=replace(plan.assumption, layouts=None))


class UnseenAutocast(Planted):
    """Forward's question for dtypes is not seen to follow autocast: a plan serves calls under another."""

    piece = "guards.calls"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return replace(plan, assumption=replace(plan.assumption, autocast=None))
