"""Mutants of what is guarded in objects that are no plain containers, and on tensors."""

from __future__ import annotations

from ariadne.guards import Marks, State
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted


class BlindToObjects(Planted):
    """What changes in a buffer, behind a weak reference or in an object of Python's own goes unnoticed."""

    piece = "guards.opened"

    def in_variant(self, variant: Variant) -> None:
        for guard in variant.guards:
            surrounded = guard._surrounded
            surrounded._kept = [kept for kept in surrounded._kept if not isinstance(kept, State)]


class BlindToMarks(Planted):
    """An attribute of a parameter that is another one goes unnoticed."""

    piece = "guards.marks"

    def in_variant(self, variant: Variant) -> None:
        for guard in variant.guards:
            guard._contents = [kept for kept in guard._contents if not isinstance(kept, Marks)]
