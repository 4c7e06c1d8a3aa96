"""Mutants of `out=` whose target grows: what the op wrote, and how large it has made the tensor that it wrote into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ariadne.capture.recorder import Recorder
from ariadne.plan import Ref, TraceNode, TracePlan, Value
from conformance.mutants.planted import Planted, edited
from conformance.mutants.unseen import _AtCapture, nothing


def _target(node: TraceNode) -> Any:
    """What an `out=` writes into, if forward gives it."""
    return dict(node.kwargs).get("out")


def _before(node: TraceNode, plan: TracePlan) -> Ref | None:
    """What stood there before an op that has made its target larger: the empty tensor of which that one shows the memory."""
    out = _target(node)
    if not isinstance(out, Ref):
        return None
    made = next((n for n in plan.nodes if n.outputs == (out.name,)), None)
    source = made.args[0] if made is not None and made.target == "aten.detach.default" else None
    empty = isinstance(source, Ref) and plan.values[source.name].shape == (0,)
    return source if empty and isinstance(source, Ref) else None


class ForgottenGrowth(Planted):
    """The write of an `out=` that makes its target larger is forgotten: what stood there before goes on."""

    piece = "capture.recorder"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            before = _before(node, plan)
            yield (
                node
                if before is None
                else replace(node, target="aten.alias.default", args=(before,), kwargs=(), writes=())
            )

        return edited(plan, edit)


class SizeBeforeGrowth(Planted):
    """What an `out=` has made larger is read by the sizes that it had before."""

    piece = "capture.values"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            before = _before(node, plan)
            if before is None:
                yield node
                return
            name, then = node.outputs[0], values[before.name]
            values[f"whole_{name}"] = replace(values[name], name=f"whole_{name}")
            yield replace(node, outputs=(f"whole_{name}",), may_alias=())
            yield TraceNode("aten.as_strided.default", (Ref(f"whole_{name}"), then.shape, (1,)), (), (name,))

        return edited(plan, edit)


class UnknownGrowth(_AtCapture):
    """Where a tensor came from that an `out=` has made larger is not noted, so that it is one that no op made."""

    piece = "capture.recorder"
    replaced = ((Recorder, "_made_before_it_was_resized", nothing),)
