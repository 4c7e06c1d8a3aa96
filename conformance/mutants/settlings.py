"""Mutants of what Python names and keeps: functions under other names, and attributes that forward reads and changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ariadne.plan import TracePlan
from conformance.mutants.planted import Planted


def _base(thing: Any) -> Any:
    """The `apply` of the class whose `forward` a function inherits."""
    cls = getattr(thing, "__self__", None)
    if not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
        return thing
    return next(c for c in cls.__mro__ if "forward" in c.__dict__).apply  # type: ignore[attr-defined]


class FunctionOfTheBase(Planted):
    """A function that inherits its forward is taken for the class that it has it from, with that one's gradient."""

    piece = "capture.applied"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        objects = {name: _base(thing) for name, thing in plan.objects.items()}
        return plan if objects == dict(plan.objects) else replace(plan, objects=objects)


class UnsettledAttribute(Planted):
    """Attributes of modules that forward reads and changes are left as they were."""

    piece = "capture.settled"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        kept = tuple(s for s in plan.stores if s.table != "__dict__")
        return plan if len(kept) == len(plan.stores) else replace(plan, stores=kept)
