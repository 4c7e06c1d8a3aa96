"""Reach: the containers that forward can put something into: in the model, in what it is given, and outside of both."""

from __future__ import annotations

from typing import Any

from torch import nn

from ariadne.capture.state import Snapshot
from ariadne.guards import Containers, outside_of, strays


class Reach:
    """The containers that forward can reach outside of the model and of what it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        self.outside = outside_of(self.modules)

    def snapshot(self, args: Any, kwargs: Any) -> Snapshot:
        """All of it as it is now, to be put back."""
        return Snapshot(self.model, (args, kwargs), self.outside)

    def containers(self, args: Any, kwargs: Any) -> Containers:
        """All containers, as they are now, with those in the arguments and in the model."""
        return Containers(self.modules, strays(self.modules), (args, kwargs), self.outside.roots)
