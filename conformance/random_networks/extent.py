"""How far each random program is tried, by the profile that ARIADNE_HYPOTHESIS_PROFILE names; it imports nothing of torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

# How many programs are drawn: smoke, full, wide or nightly.
PROFILE = os.environ.get("ARIADNE_HYPOTHESIS_PROFILE", "smoke")


@dataclass(frozen=True)
class Extent:
    """How far each program is tried: its most steps, in one mode or both, at about how many cuts; a session's actions."""

    steps: int = 12
    both_modes: bool = True
    cuts: int = 1000
    session_steps: int = 8
    actions: int = 16
    named: bool = False  # whether each program has one of the steps in `draw.NAMED`
    least: tuple[int, ...] = (1, 1, 1, 0)  # the smallest batch of a program is one of these


ALL = Extent()
EXTENT = {
    # Batch 0 stands in the corpus. A program is tried in one of the two modes: those of an odd number of steps train.
    "smoke": Extent(both_modes=False, cuts=1, actions=10, least=(1,)),
    "wide": Extent(steps=5, both_modes=False, cuts=3, session_steps=4, actions=14, named=True),
}.get(PROFILE, ALL)
