"""Imports of many modules, without Python's garbage collector.

It would look through all that was imported so far, again and again, and finds nothing: what is imported stays. Of the seconds that
torch's compilers and sympy take to import, a quarter goes there; and as much again once it is on, unless what was imported counts
as old by then.
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType


def imported(name: str) -> ModuleType:
    """The module of this name, imported where it was not yet; the collector is off meanwhile, and on again if it was on.

    All objects of the process are as old as can be then: a cycle that was let go of before waits for the next full collection.

    >>> imported("ariadne.errors").__name__
    'ariadne.errors'
    """
    on, known = gc.isenabled(), name in sys.modules
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if on and not known and not gc.get_freeze_count():  # what the user froze is to stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, with no look at any of them
        if on:
            gc.enable()
