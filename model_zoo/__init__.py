"""Named PyTorch models with seeded random weights, for checks that run over many models.

    entry = model_zoo.entry("torchvision/resnet18")
    model = entry.build().eval()
    args, kwargs = entry.inputs(batch=2)              # ((Tensor of (2, 3, 64, 64),), {})
    entry.loss(model(*args, **kwargs)).backward()

Nothing is downloaded, and the libraries are imported when one of their models is built, not before.

Each file imports only from those before it:

    errors, process, values -> packages -> sampling, losses, weights -> definition -> families/* -> catalogue -> __main__
"""

import importlib
from typing import TYPE_CHECKING, Any

from model_zoo.errors import MissingPackageError, UnknownNameError

if TYPE_CHECKING:
    from model_zoo.catalogue import FAMILIES, entry, names
    from model_zoo.definition import Entry

__all__ = ["FAMILIES", "Entry", "MissingPackageError", "UnknownNameError", "entry", "names"]

_HOMES = {
    "FAMILIES": "catalogue",
    "Entry": "definition",
    "entry": "catalogue",
    "names": "catalogue",
}  # they bring torch


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'model_zoo' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"model_zoo.{_HOMES[name]}"), name)
    return value
