"""Processes of their own for tests, forked from one that has imported torch already: a start takes no seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "ariadne.remote",
    "ariadne.pipeline.steps",
    "conformance.unit.remote_kit",
    "conformance.unit.pipeline.ranks",
]


def forked() -> ForkServerContext:
    """What makes such processes; all tests of this process share the one that they are forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
