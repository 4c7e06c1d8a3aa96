"""The reference package `ariadne-split` of PyPI; its import name is `ariadne` too, so it lies in a folder of its own.

The environment variable ARIADNE_SPLIT names that folder: `pip install --no-deps --target FOLDER ariadne-split`. The process must
not have imported the other `ariadne`; the runner gives each target a process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from conformance.targets.base import LARGEST, Captured, Loss, Target

FOLDER = os.environ.get("ARIADNE_SPLIT", "")
if not FOLDER:
    raise ImportError("set ARIADNE_SPLIT to the folder that ariadne-split is installed in")
if "ariadne" in sys.modules:
    raise ImportError("this process has imported the other package that is called ariadne")
sys.path.insert(0, FOLDER)

import ariadne  # noqa: E402


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """As its README's section "Basic Split Inference", in the middle."""
    if kwargs:
        raise TypeError("prepare_split takes example_inputs by position only")
    spec = ariadne.SplitSpec(boundary="percent:50", dynamic_batch=(2, LARGEST), trace_batch_mode="batch_gt1")
    runtime = ariadne.prepare_split(model, example_inputs=tuple(args), split=spec, mode="generated_eager")

    def call(*args: Any) -> Any:
        return runtime.run_suffix(runtime.run_prefix(*args))

    def step(loss: Loss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        boundary = runtime.run_training_prefix(*args)
        _, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda output, _: loss(output))
        runtime.backward_prefix(boundary, boundary_grads=gradients)

    return Captured(call, step=step)


TARGET = Target(
    name="ariadne_split",
    title="ariadne-split (PyPI)",
    kind="split",
    package="ariadne-split",
    source="../../../docs/scoreboard.md",
    capture=capture,
    disclaims={
        "one": "declared for batches from 2, as in its README",
        "replaced": "its README promises nothing for parameters that are replaced",
        "flag": "its README promises nothing for a mode that changes",
        "hook": "its README promises nothing for hooks that are added later",
        "branch-on-data": "it traces the observed forward",
        "branch-on-batch": "it traces the observed forward",
        "branch-on-mode": "it traces the observed forward",
        "python-random": "it traces the observed forward",
        "python-state": "it traces the observed forward",
        "keyword": "positional example inputs only",
    },
)
