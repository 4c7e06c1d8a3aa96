"""Mutants of capture: functions that stay whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ariadne import tree
from ariadne.capture import is_scripted
from ariadne.plan import TracePlan
from conformance.mutants.planted import Planted


class _Detached:
    """A scripted function whose results have no gradients, as ops look that the executor differentiates by itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any) -> Any:
        found = self.inner(*args)
        return tree.map_leaves(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, found)


class DetachedScript(Planted):
    """What a scripted function gives has lost its gradients."""

    piece = "capture.scripted"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        calls = {node.args[0].name for node in plan.nodes if is_scripted(node) and not node.is_witness}
        objects = {name: _Detached(thing) if name in calls else thing for name, thing in plan.objects.items()}
        return replace(plan, objects=objects)
