"""TorchLens: what eager Python runs is logged; another call runs the model again, under the log's guard on its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torchlens
from torch import nn

from conformance.targets.base import SNAPSHOT, Captured, Target


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """`trace`, and for each call `run` on the live model, as the README says for other inputs."""
    log = torchlens.trace(model, list(args), dict(kwargs), intervention_ready=True)

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if kwargs:
            raise TypeError("run takes the inputs of the forward by position only")
        found = log.run(model, list(args))
        return [found[label].out for label in found.output_layers]

    return Captured(call, flat=True)


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
        "gradients": "a training step through a log is not documented for a rerun",
    },
)
