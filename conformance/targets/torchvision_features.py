"""torchvision's feature extraction: the prefix up to a node in the middle; there is no suffix, so only prefixes are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torchvision.models.feature_extraction import NodePathTracer, create_feature_extractor

from conformance.targets.base import Captured, Target
from conformance.targets.fx_trace import FX_DISCLAIMS


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """What is held against the model is its output, put together from its nodes; a node in the middle is returned beside them."""
    tracer = NodePathTracer()
    graph = tracer.trace(model)
    names = tracer.node_to_qualname
    calls = [names[node] for node in graph.nodes if node.op.startswith("call_") and node in names]
    [output] = [node.args[0] for node in graph.nodes if node.op == "output"]
    wanted = [calls[len(calls) // 2]]

    def put_together(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
        """A node's value; one without a name, such as a named tuple around the outputs, is made here."""
        if node in names:
            return value(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: put_together(each, value))
        return node.target(*args, **kwargs) if callable(node.target) else None

    fx.map_arg(output, lambda node: put_together(node, lambda each: wanted.append(names[each])))
    made = create_feature_extractor(model, return_nodes=list(dict.fromkeys(wanted)))

    def call(*args: Any, **kwargs: Any) -> Any:
        features = made(*args, **kwargs)
        return fx.map_arg(output, lambda node: put_together(node, lambda each: features[names[each]]))

    return Captured(call, owner=made)


TARGET = Target(
    name="torchvision_features",
    title="torchvision feature extraction",
    kind="prefix",
    package="torchvision",
    source="https://docs.pytorch.org/vision/stable/feature_extraction.html",
    capture=capture,
    disclaims={
        **FX_DISCLAIMS,
        "writes": "a feature is what a node gives; what is written into it later is not said",
        "views": "a feature is what a node gives; what is written into it later is not said",
    },
)
