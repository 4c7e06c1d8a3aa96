"""Mutants of what is guarded in objects that are no plain containers."""

from __future__ import annotations

import copy

from ariadne.guards.opened import State
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted


class BlindToObjects(Planted):
    """What changes in a buffer, behind a weak reference or in an object of Python's own goes unnoticed."""

    piece = "guards.opened"

    def in_variant(self, variant: Variant) -> None:
        for guard in variant.guards:
            guard.baseline = copy.copy(guard.baseline)
            guard.baseline.outside = [o for o in guard.baseline.outside if not isinstance(o.kept, State)]
            guard._arm()
