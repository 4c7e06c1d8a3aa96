"""A module that Python's own list of names may hold, too: whose code it is goes by where the file lies."""

from __future__ import annotations

from typing import Any

import torch

__name__ = "profile"  # what a user's profile.py is called, as Python's own


def scaled(config: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiply by what the config says, through a name of its own."""
    found: torch.Tensor = x * getattr(config, GAIN)
    return found


GAIN = "gain"
