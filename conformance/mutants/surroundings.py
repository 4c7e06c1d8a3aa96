"""Mutants of what is guarded outside of modules: functions, settings of torch; and of what a plan does with settings."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from ariadne.capture import observed
from ariadne.capture.history import History
from ariadne.guards import Switched
from ariadne.guards.switches import SETTERS
from ariadne.plan import TracePlan
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted


class BlindToFunctions(Planted):
    """A function, a method or a variable outside of the model that is another one goes unnoticed."""

    piece = "guards.watched"

    def in_variant(self, variant: Variant) -> None:
        for guard in variant.guards:
            guard.baseline = copy.copy(guard.baseline)
            guard.baseline.outside = []
            guard._arm()


class BlindToClasses(Planted):
    """A number that stands on a class and is another one goes unnoticed, also behind one of its name, where `super()` finds it."""

    piece = "guards.baseline"

    def in_variant(self, variant: Variant) -> None:
        for guard in variant.guards:
            guard.baseline = copy.copy(guard.baseline)
            guard.baseline.outside = [o for o in guard.baseline.outside if not o.name.endswith(".gain")]
            guard._arm()


class BlindToSwitches(Planted):
    """A setting of torch that forward asked for, and that stands otherwise, goes unnoticed."""

    piece = "guards.switches"

    def in_variant(self, variant: Variant) -> None:
        enter, then = variant.enter, [s for s in variant.plan.assumption.switches if s[0] in SETTERS]

        def blind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
            with Switched(*then):
                found: tuple[Any, ...] | None = enter(args, kwargs)
            return found

        variant.enter, variant._switches = blind, []


class LostSettings(Planted):
    """Ops run under the settings of the caller where forward had set others."""

    piece = "segment.codegen"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        nodes = tuple(replace(n, region=replace(n.region, switches=())) for n in plan.nodes)
        return plan if nodes == plan.nodes else replace(plan, nodes=nodes)


class NoHistory(Planted):
    """What forward left in Python at another batch is not looked at: a result may follow it."""

    piece = "capture.history"

    @classmethod
    def prepare(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> Planted:
        """As before the model was ever run again after another batch."""
        with _put(observed, "lived", lambda *_: History()):
            return super().prepare(model, example_inputs, **options)


class BlindToIs(Planted):
    """A size that is compared by `is` goes unnoticed."""

    piece = "capture.identity"

    @classmethod
    def prepare(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> Planted:
        """As if no function compared anything by `is`."""
        with _put(observed, "watching", lambda codes: nullcontext([])):
            return super().prepare(model, example_inputs, **options)


@contextmanager
def _put(module: Any, name: str, thing: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, thing)
    try:
        yield
    finally:
        setattr(module, name, before)
