"""The one place that imports a model library."""

import importlib
from typing import Any

from model_zoo.errors import MissingPackageError
from model_zoo.process import undisturbed


def package(name: str) -> Any:
    """The module `name` ("timm", "torchvision.models"); MissingPackageError when its distribution is not installed."""
    top = name.partition(".")[0]
    try:
        with undisturbed():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == top:
            raise MissingPackageError(top) from error
        raise  # installed, but broken: its own words are the better ones
