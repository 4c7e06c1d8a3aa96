"""Mutants of halves that move: what a file says of dtypes and flags is not what the model does."""

from __future__ import annotations

from typing import Any

from conformance.mutants.files import _InFile


class UnseenDtype(_InFile):
    """That forward asked for a tensor's dtype is not in the file."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            plan["assumption"]["dtypes"] = False


class MovedAttributes(_InFile):
    """A tensor in a plain attribute counts as a buffer, which `.to()` moves."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for entry in half["state"]:
            for place in entry[0]:
                place[0] = place[0].replace("attribute", "buffer")
