"""The command line: `ariadne COMMAND MODEL`, for a look at a model before cutting it.

The files, in import order; nothing else in `ariadne` imports them::

    output             answers as text, tables and JSON; progress
    options            the options that commands share
    grammar            every command with its options
    entry              one is chosen, imported, run and answered for
    inputs, subject    what the user typed: example inputs, and the model that is meant
    plan, cuts, show, draw, profile, parts, check, bench, save, inspect, cache, doctor, completion     the commands, when chosen
    serve, ping, run, keys     the commands of two processes, likewise

Each command is a function from parsed options to an `Answer`; only `main` writes to stdout.
"""

import warnings

# torch says so as it is imported where there is no numpy, which nothing here needs; it reads like a broken installation.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from ariadne.cli.entry import main  # noqa: E402 - after what its imports would say
from ariadne.cli.grammar import parser  # noqa: E402

__all__ = ["main", "parser"]
