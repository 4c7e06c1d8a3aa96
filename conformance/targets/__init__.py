"""The systems of the scoreboard: one file for each, named here in the order of the table.

A file with a `TARGET` is all that a system needs; `base` says what that holds.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from pathlib import Path

from conformance.targets.base import Target

NAMES = (
    "ariadne_here",
    "ariadne_python",
    "ariadne_split",
    "jit_trace",
    "jit_script",
    "fx_trace",
    "make_fx",
    "export",
    "export_strict",
    "compile_eager",
    "lazy_tensor",
    "fx_split_module",
    "pipelining",
    "torchvision_features",
    "torchlens",
    "onnx_dynamo",
)


class MissingTargetError(ImportError):
    """The system is not installed."""


def target(name: str) -> Target:
    """The target of that name, or of a file `….py` anywhere; MissingTargetError where its package is not installed."""
    try:
        if name.endswith(".py"):
            path = Path(name)
            spec = importlib.util.spec_from_file_location(f"scoreboard_target_{path.stem}", path)
            if spec is None or spec.loader is None or not path.is_file():
                raise ValueError(f"{name}: expected a Python file with a TARGET, found none")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        elif name in NAMES:
            module = importlib.import_module(f"conformance.targets.{name}")
        else:
            raise ValueError(f"no target {name!r}; there are {', '.join(NAMES)}, or give a file that ends in .py")
    except ImportError as error:
        raise MissingTargetError(f"{name}: not installed: {error}") from error
    found: Target = module.TARGET
    return found


def version(made: Target) -> str:
    """The version of a target's distribution."""
    try:
        return metadata.version(made.package)
    except metadata.PackageNotFoundError:
        return "this checkout" if made.package == "ariadne-runtime" else "unknown"
