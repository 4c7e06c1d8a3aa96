"""An entry of the zoo's kind from a package, a name and options."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import COSTS, Entry
from model_zoo.packages import package
from model_zoo.sampling import Sampler


def made(module: str, name: str, options: dict[str, Any]) -> nn.Module:
    """The class or function `name` of a module of some package, called with options."""
    model: nn.Module = getattr(package(module), name)(**options)
    return model


def entry(module: str, name: str, sample: Sampler, tags: str = "", *, as_name: str = "", **options: Any) -> Entry:
    """The entry `wild/PACKAGE/NAME` in lower case; `as_name` where one class makes several. Costs a medium step unless tagged."""
    full = f"wild/{module.partition('.')[0]}/{(as_name or name).lower()}"
    words = frozenset(tags.split())
    return Entry(full, words if words & COSTS else words | {"medium"}, partial(made, module, name, options), sample)
