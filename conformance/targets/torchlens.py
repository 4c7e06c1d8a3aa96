"""TorchLens: what eager Python runs is logged; another call runs the model again, under the log's guard on its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torchlens
from torch import nn

from conformance.targets.base import SNAPSHOT, Captured, Target


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """`trace`, and for each call `run`, which runs the live model on other inputs and holds its graph against the log's."""
    log = torchlens.trace(model, list(args), dict(kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError("run takes the inputs of the forward by position only")
        return log.run(inputs=args[0] if len(args) == 1 else tuple(args)).output

    return Captured(call)


TARGET = Target(
    name="torchlens",
    title="TorchLens",
    kind="capture",
    package="torchlens",
    source="https://github.com/johnmarktaylor91/torchlens",
    capture=capture,
    disclaims={
        **SNAPSHOT,
        "left": "a trace runs the model, whose own forward may move its state",
        "state": "documented: a run puts the model's declared state back",
        "buffers": "documented: a run puts the model's declared state back",
        "python-state": "a trace runs the model, whose own forward may move its state",
        "random": "a run starts from a random state of its own, as its option `seed` says",
        "dropout": "a run starts from a random state of its own, as its option `seed` says",
        "gradients": "a training step through a log is not documented for a rerun",
    },
)
