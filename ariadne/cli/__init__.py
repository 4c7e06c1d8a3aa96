"""The command line: `ariadne COMMAND MODEL`, for a look at a model before cutting it.

The files, in import order; nothing else in `ariadne` imports them::

    output             answers as text, tables and JSON; progress
    inputs, subject    what the user typed: example inputs, and the model that is meant
    options            the options that commands share
    plan, cuts, show, draw, profile, parts, check, bench, save, inspect, doctor, completion     the commands
    entry              one is chosen, run and answered for

Each command is a function from parsed options to an `Answer`; only `main` writes to stdout.
"""

import warnings

# torch says so as it is imported where there is no numpy, which nothing here needs; it reads like a broken installation.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from ariadne.cli.entry import main, parser  # noqa: E402 - after what its imports would say

__all__ = ["main", "parser"]
