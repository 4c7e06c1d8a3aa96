"""What tells one package from another beside its kernel: this code, the processor, and what the names in a kernel stand for."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from pathlib import Path
from typing import Any

import torch

from ariadne.compiled.lift import Lifted


@functools.cache
def sources() -> str:
    """A digest of this package's code, since a package holds what it makes of a kernel."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def processor() -> tuple[str, ...]:
    """The CPU, with every feature that it says it has: native code is compiled for just this one."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().partition("\n\n")[0].splitlines() if told.exists() else []
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return platform.machine(), platform.processor(), *(line for line in lines if line.startswith(wanted))


def names(lifted: Lifted) -> list[list[str]]:
    """What the names in a kernel's source stand for: a plan from a file says by itself what its signature is."""
    used = set(re.findall(r"[^\W\d]\w*", "\n".join(lifted.body)))
    return [[name, _told(thing)] for name, thing in sorted(lifted.source.namespace.items()) if name in used]


def _told(thing: Any) -> str:
    """A function by where it is from, a plain value by how it is written, anything else by its type."""
    if isinstance(
        thing, (torch.dtype, torch.device, torch.layout, torch.memory_format, int, float, complex, str, bytes)
    ):
        return repr(thing)
    if isinstance(thing, torch._ops.OpOverload):
        return str(thing)
    owner = getattr(thing, "__self__", None)
    name = getattr(thing, "__qualname__", None)
    if name is None or isinstance(thing, type(None)):
        return type(thing).__qualname__
    return f"{getattr(thing, '__module__', None) or type(owner).__module__}.{name}"
