"""Imports of many modules, without Python's garbage collector.

It would look through all that was imported so far, again and again, and finds nothing: what is imported stays. Of the seconds that
torch's compilers and sympy take to import, a quarter goes there.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def imported(name: str) -> ModuleType:
    """The module of this name, imported where it was not yet; the collector is off meanwhile, and on again if it was on.

    >>> imported("ariadne.errors").__name__
    'ariadne.errors'
    """
    on = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if on:
            gc.enable()
