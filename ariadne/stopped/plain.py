"""Plain: a module that runs torch's own code alone, whose call leaves nothing behind in Python, and need not be run once more."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import nn

from ariadne.guards import global_hooks
from ariadne.stopped.laid import CALLS, REGISTRIES

_FOLDER = nn.modules.__file__.rpartition("__init__")[0]
_INERT = frozenset({bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
_TABLES = frozenset({"_modules", "_parameters", "_buffers", *CALLS})
_TENSORS = (torch.Tensor, nn.Parameter, type(None))
Told = tuple[int, ...]


def told_of(module: nn.Module) -> Told | None:
    """What tells a module: a checksum of the classes in it, and which are training; None where other code than torch's own may run.

    `module` has a gate in it (`gate.Awaited`), which counts for nothing.
    """
    modules = [*module.modules()]
    if (
        global_hooks()
        or any(not CALLS.isdisjoint(one.__dict__) for one in modules[1:])
        or not all(map(_is_plain, modules))
    ):
        return None
    return crc32(" ".join(type(one).__qualname__ for one in modules).encode()), *(one.training for one in modules)


def _is_inert(value: Any) -> bool:
    """Whether a value of a module runs nothing but torch's own code: a number, words, or a function of torch such as `F.relu`."""
    if type(value) in (tuple, list):
        return all(map(_is_inert, value))
    return type(value) in _INERT or (
        callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] == "torch"
    )


def _is_plain(module: nn.Module) -> bool:
    cls, own = type(module), module.__dict__
    code = getattr(cls.forward, "__code__", None)
    if code is None or not code.co_filename.startswith(_FOLDER) or not cls.__module__.startswith("torch.nn.modules."):
        return False
    if "forward" in own or any(own[name] for name in own if name in REGISTRIES):
        return False
    if not all(_is_inert(value) for name, value in own.items() if name not in REGISTRIES and name not in _TABLES):
        return False
    return all(type(t) in _TENSORS for table in (module._parameters, module._buffers) for t in table.values())
