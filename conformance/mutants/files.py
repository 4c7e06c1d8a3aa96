"""Mutants of halves as files: what is written is not what the split holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from conformance.mutants.planted import Planted
from conformance.suite.halves_fuzz import closed, opened


class _InFile(Planted):
    """A file that is written right, and then changed by `in_half`."""

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().save(path, **options)
        header, half, body = opened(Path(path).read_bytes())
        self.in_half(half)
        Path(path).write_bytes(closed(header, half, body))

    def in_half(self, half: dict[str, Any]) -> None:
        """Change the half in the file's metadata."""


class SwappedWeights(_InFile):
    """Two weights of one shape are in the file under each other's name."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for i, one in enumerate(half["state"]):
            for other in half["state"][:i]:
                if one[4:] == other[4:] and one[0][0][0] == "parameter":
                    one[3], other[3] = other[3], one[3]
                    return


class StaleAlias(_InFile):
    """A tensor that stands under several names is several tensors once it is loaded."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        half["state"] = [[[place], *rest] for places, *rest in half["state"] for place in places]


class LostBatches(_InFile):
    """That a plan holds for some batches only is not in the file."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            plan["batches"] = [half["batches"]]


class MisplacedConstant(_InFile):
    """A tensor that forward makes of no tensor comes back on another device."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            for constant in plan["constants"].values():
                constant[-1] = "meta"
