"""torchvision's feature extraction: the prefix up to a node in the middle; there is no suffix, so only prefixes are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from conformance.targets.base import Captured, Target
from conformance.targets.fx_trace import FX_DISCLAIMS


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """What is held against the model is its output, which is the last node; a node in the middle is returned beside it."""
    training, _ = get_graph_node_names(model)
    calls = [name for name in training if name not in ("x", "output")]
    wanted = dict.fromkeys([calls[len(calls) // 2], calls[-1]])
    made = create_feature_extractor(model, return_nodes=list(wanted))
    return Captured(lambda *a, **k: made(*a, **k)[calls[-1]], owner=made)


TARGET = Target(
    name="torchvision_features",
    title="torchvision feature extraction",
    kind="prefix",
    package="torchvision",
    source="https://docs.pytorch.org/vision/stable/feature_extraction.html",
    capture=capture,
    disclaims={
        **FX_DISCLAIMS,
        "nested-output": "a node is a tensor: its features are named nodes, not the output's form",
        "writes": "a feature is what a node gives; what is written into it later is not said",
        "views": "a feature is what a node gives; what is written into it later is not said",
    },
)
