"""Mutants of calls that find the model changed: no plan is captured, or one for each call."""

from __future__ import annotations

from typing import Any

from ariadne.errors import ModuleError
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted


class StaleAfterChange(Planted):
    """A call that finds the model changed runs by the plan that was used last."""

    piece = "runtime.plans"

    def _difference(self, variant: Variant) -> ModuleError | None:
        return None


class DoorAsksThePrefix(Planted):
    """What changed after the cut is not looked at before the prefix runs."""

    piece = "runtime.variant"

    def in_variant(self, variant: Variant) -> None:
        variant.guard = variant.prefix_guard


class KnownModelAnew(Planted):
    """A model that is put back as it was has a plan captured again."""

    piece = "runtime.plans"

    def _enter_anew(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Variant, tuple[Any, ...]]:
        return self._captured(args, kwargs, training)
