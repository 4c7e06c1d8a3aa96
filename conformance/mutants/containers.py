"""Mutants of what is put into containers: dropped, done twice, done by the wrong side."""

from __future__ import annotations

from dataclasses import replace

from ariadne.plan import TracePlan
from conformance.mutants.planted import Planted


class LostPut(Planted):
    """What forward puts into containers is computed and dropped."""

    piece = "guards.effects"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        kept = tuple(s for s in plan.stores if not s.inside)
        return plan if len(kept) == len(plan.stores) else replace(plan, stores=kept)


class PutTwice(Planted):
    """What forward appends to a list is appended twice."""

    piece = "segment.codegen"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        found = tuple(t for s in plan.stores for t in ((s, s) if s.how in ("append", "grow") else (s,)))
        return plan if len(found) == len(plan.stores) else replace(plan, stores=found)


class PutByTheOtherSide(Planted):
    """What comes later into a list may be appended before what comes first, since nothing is waited for."""

    piece = "plan.trace"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        found = tuple(replace(s, needs=()) for s in plan.stores[::-1])
        return replace(plan, stores=found) if any(s.inside for s in plan.stores) else plan
