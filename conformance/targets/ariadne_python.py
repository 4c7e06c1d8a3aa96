"""Ariadne, from this checkout, which runs the model's own Python where no graph holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from conformance.targets import ariadne_here

TARGET = replace(
    ariadne_here.TARGET,
    name="ariadne_python",
    title='Ariadne, fallback="python"',
    source="docs/when-no-graph-holds.md of this repository",
    capture=partial(ariadne_here.capture, fallback="python"),
)
