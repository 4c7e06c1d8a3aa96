"""Mutants of plans that branch: a call that was on the wrong path is not taken back, or goes on where it should not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ariadne.runtime.moved import Kept, Moves, Seen
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted


class _Forgets:
    """Keeps what a side moves, save for one kind of it."""

    def __init__(self, moves: Moves, what: str) -> None:
        self.moves, self.what, self.writes = moves, what, moves.writes

    def keep(self, given: Sequence[Any], call: Any = None) -> Kept:
        """What stood there, without that."""
        kept = self.moves.keep(given, call)
        setattr(kept, self.what, [])
        return kept

    def seen(self, given: Sequence[Any], call: Any) -> Seen:
        """As it is."""
        return self.moves.seen(given, call)


def _forgetting(variant: Variant, what: str) -> None:
    if variant.prefix_moves is not None:
        variant.prefix_moves = _Forgets(variant.prefix_moves, what)  # type: ignore[assignment]
    if variant.suffix_moves is not None:
        variant.suffix_moves = _Forgets(variant.suffix_moves, what)  # type: ignore[assignment]


class StateNotPutBack(Planted):
    """What the ops before a question wrote stays written when the call is taken back."""

    piece = "runtime.moved"

    def in_variant(self, variant: Variant) -> None:
        _forgetting(variant, "tensors")


class DrawsNotPutBack(Planted):
    """What was drawn before a question stays drawn when the call is taken back."""

    piece = "runtime.moved"

    def in_variant(self, variant: Variant) -> None:
        _forgetting(variant, "numbers")


class StalePath(Planted):
    """A call on another path goes on on the one of the call before: its answers are not asked for."""

    piece = "runtime.paths"

    def _others(self, call: Any, training: bool, variant: Variant, question: Any) -> Any:
        for side in ("prefix", "suffix"):
            source = getattr(variant, f"{side}_source")
            text = "\n".join(line for line in source.text.split("\n") if "raise broken_witness(" not in line)
            self.recode(
                variant, side, type(source)(source.name, text, source.namespace, source.parameters, source.returns)
            )
        yield variant, variant.enter(*call)
